//go:build unix

package main

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestTheSameCronLineOnSeveralHostsRunsOnce(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		var replicas []*replica
		for _, name := range []string{"a", "b", "c"} {
			replicas = append(replicas, s.start(t, name, append([]string{"--once", "--every", "24h"}, s.service(t, "exit=0")...)...))
		}
		for _, r := range replicas {
			if status := r.awaitExit(t); status != 0 {
				t.Errorf("%s: exit status %d", r.name, status)
			}
		}
		if starts := s.starts(t); len(starts) != 1 {
			t.Errorf("it ran %d times: %+v", len(starts), starts)
		}
	})
}

func TestARunCountsForTheCommandsOfItsTime(t *testing.T) {
	const every = 24 * time.Hour
	type command struct {
		at     time.Duration // when it begins
		lasts  time.Duration // if it runs
		status int
		runs   bool
	}
	for name, commands := range map[string][]command{
		"three hosts whose clocks differ": {{0, time.Second, 0, true}, {3 * time.Minute, time.Second, 0, false}, {5 * time.Minute, time.Second, 0, false}},
		"the next day":                    {{0, time.Second, 0, true}, {every - 5*time.Minute, time.Second, 0, true}, {every, time.Second, 0, false}, {2 * every, time.Second, 0, true}},
		"one that was waited for":         {{0, 20 * time.Hour, 0, true}, {time.Minute, time.Second, 0, false}, {every, time.Second, 0, true}},
		"one that has failed":             {{0, time.Second, 1, true}, {time.Minute, time.Second, 0, true}, {2 * time.Minute, time.Second, 0, false}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, start := storetest.NewMem(), time.Now()
				for i, c := range commands {
					opts := &runOptions{every: every, once: true}
					opts.keyName = "nightly"
					began := start.Add(c.at)
					time.Sleep(time.Until(began))
					ctx, cancel := context.WithCancelCause(t.Context())
					r := &runner{opts: opts, log: slog.New(slog.DiscardHandler), shutdown: cancel, began: began}
					lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: opts.key(), Logger: r.log})
					if err != nil {
						t.Fatal(err)
					}
					ran := false
					err = tenure.Do(t.Context(), lease, func(ctx context.Context) error {
						return r.oncePer(ctx, store, func(context.Context) error {
							ran = true
							time.Sleep(c.lasts)
							r.onceEnded = &ending{Status: c.status}
							return nil
						})
					})
					cancel(nil)
					if err != nil || ran != c.runs || ctx.Err() == nil || r.onceEnded == nil || r.onceEnded.Status != c.status {
						t.Errorf("command %d: ran: %v, ended: %+v, %v", i, ran, r.onceEnded, errors.Join(err, context.Cause(ctx)))
					}
				}
			})
		})
	}
}
