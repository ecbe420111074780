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
	// Times are what the command is for, on a quiet machine; here everything else is checked.
	o := options{duration: time.Minute, seed: uint64(time.Now().UnixNano()), only: regexp.MustCompile(""), patience: 5}
	if err := run(t.Context(), t.Output(), o); err != nil {
		t.Error(err)
	}
}
