package main

import (
	"os"
	"regexp"
	"testing"
	"time"
)

// TestMain makes this test binary serve as the replicas' program too.
func TestMain(m *testing.M) {
	beChild()
	os.Exit(m.Run())
}

func TestNoPromiseIsBrokenDuringAMinuteOfFaults(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute")
	}
	if err := run(t.Context(), t.Output(), time.Minute, uint64(time.Now().UnixNano()), regexp.MustCompile(""), ""); err != nil {
		t.Error(err)
	}
}
