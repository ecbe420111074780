package main

import "testing"

func TestTheWorkChangesHandsTwiceAndNeverOverlaps(t *testing.T) {
	if err := run(t.Context()); err != nil {
		t.Fatal(err)
	}
}
