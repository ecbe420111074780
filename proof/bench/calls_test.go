package main

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestACallBeginsAfterSilenceAndCountsOnceAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // time passes only where the test says so
		var c calls
		began := time.Now().Add(-time.Hour)
		c.sent(began)
		if !c.lastSuccess().IsZero() {
			t.Error("a call without an answer counts as a success")
		}
		if !c.unanswered() {
			t.Error("the call counts as answered before its answer has come")
		}
		c.sent(began.Add(quiet / 2)) // of the same call
		c.answered()
		if c.unanswered() {
			t.Error("it passes for unanswered after it was answered")
		}
		c.sent(time.Now()) // an acknowledgement, that belongs to it
		if c.unanswered() {
			t.Error("what follows an answer passes for another call")
		}
		if got := c.lastSuccess(); !got.Equal(began) {
			t.Errorf("got %v after it, want its begin", got.Sub(began))
		}
		next := time.Now().Add(time.Hour)
		c.sent(next)
		if got := c.lastSuccess(); !got.Equal(began) {
			t.Error("the next call counts before it is answered")
		}
		c.answered()
		if got := c.lastSuccess(); !got.Equal(next) {
			t.Error("the next call does not count though it is answered")
		}
	})
}
