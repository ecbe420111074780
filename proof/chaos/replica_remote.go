package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// workRemotely works on rows by value, as a worker does that reaches only servers, and as these servers do: no
// session of this process knows its claims.
func (r *replica) workRemotely(ctx context.Context, queue *claims.Queue, workers int) {
	for ; ctx.Err() == nil; pause(ctx, about(r.Pace)) {
		if err := r.workInSession(ctx, queue, workers); err != nil {
			r.tellSetUp(err)
			slog.Debug("remote worker", "error", err)
		}
	}
}

var remoteSessions atomic.Int64

// workInSession works until a session is lost. The answers to some takes are lost.
func (r *replica) workInSession(ctx context.Context, queue *claims.Queue, workers int) error {
	id := fmt.Sprintf("%s-%d-%d", r.Name, monotonic(), remoteSessions.Add(1))
	lease := func() (*tenure.Lease, error) { // of any server
		return tenure.NewLease(r.backend.store(), tenure.LeaseConfig{Key: claims.SessionKey(id), TTL: r.TTL, Holder: r.birth, Expiry: r.Expiry})
	}
	first, err := lease()
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, r.TTL)
	defer cancel()
	sent := time.Now()
	term, err := first.TryAcquire(limited)
	if err != nil {
		return err
	}
	live, lose := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer lose()
	running.Go(func() { r.sendHeartbeats(live, lose, lease, term, sent) })
	var (
		mu    sync.Mutex // guards have
		have  = map[claims.Claim]bool{}
		twice sync.Map
	)
	known := func() []claims.Claim {
		mu.Lock()
		defer mu.Unlock()
		all := []claims.Claim{}
		for c := range have {
			all = append(all, c)
		}
		return all
	}
	// The session may have a row again before its release is answered.
	release := func(ctx context.Context, released ...claims.Claim) error {
		for _, c := range released {
			twice.CompareAndDelete(c.Key.ID, c.Token)
		}
		return queue.Release(ctx, released...)
	}
	for ; live.Err() == nil; pause(live, r.Pace/4) {
		has := known()
		if len(has) >= workers {
			continue
		}
		waiting, cancel := context.WithTimeout(live, r.TTL/3)
		got, err := queue.TryTakeFor(waiting, id, claims.TakeOptions{N: workers - len(has), Have: has})
		if err == nil && len(got) == 0 {
			err = queue.AwaitReady(waiting, "")
		}
		cancel()
		if err != nil {
			slog.Debug("remote take", "error", err)
			continue
		}
		if rand.N(8) == 0 || live.Err() != nil { // the answer is lost, or comes too late
			continue
		}
		for _, c := range got {
			mu.Lock()
			have[c] = true
			mu.Unlock()
			running.Go(func() {
				if err := r.workOnRow(live, release, queue, c, &twice); err != nil && live.Err() == nil {
					_ = queue.Release(live, c)
				}
				mu.Lock()
				defer mu.Unlock()
				delete(have, c)
			})
		}
	}
	return nil
}

// sendHeartbeats renews a session at a new server each time, and calls lose when it may have ended. Some
// heartbeats are late, and some answers to them are lost.
func (r *replica) sendHeartbeats(ctx context.Context, lose func(), server func() (*tenure.Lease, error), term *tenure.Term, sent time.Time) {
	trusted := r.TTL - r.TTL/30
	trust := time.AfterFunc(time.Until(sent.Add(trusted)), lose)
	defer trust.Stop()
	every := func() time.Duration {
		if rand.N(20) == 0 {
			return r.TTL * 5 / 4
		}
		return about(r.TTL / 3)
	}
	for pause(ctx, every()) {
		lease, err := server()
		if err != nil {
			slog.Error("a server's lease", "error", err)
			return
		}
		limited, cancel := context.WithTimeout(ctx, r.TTL/3)
		sent := time.Now()
		_, err = lease.Resume(limited, term.ID(), term.Token())
		cancel()
		switch {
		case errors.Is(err, tenure.ErrLost):
			lose()
		case err == nil && rand.N(8) > 0:
			trust.Reset(time.Until(sent.Add(trusted)))
		}
	}
}
