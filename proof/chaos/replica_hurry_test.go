package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestContextsOfHurriedCallsEndAtAnyMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const takes = 5 * time.Millisecond
		var h hurry
		ended := map[time.Duration]int{} // by the fifth of the call in which its context ended; 5 means it succeeded
		for range 2000 {
			began := time.Now()
			_ = h.once(func(ctx context.Context) error {
				pause(ctx, takes)
				return ctx.Err()
			})
			ended[time.Since(began)*5/takes]++
		}
		for fifth := range time.Duration(6) {
			if ended[fifth] < 50 {
				t.Errorf("of 2000 calls, %d ended in fifth %d: %v", ended[fifth], fifth, ended)
			}
		}
	})
}
