package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// workedOn is the table of rows. Without NotBefore, which goes by the database's clock, no row is
// held back for hours because that clock was moved.
var workedOn = claims.QueueConfig{
	Table: "work", Attempts: "attempts", Ready: "status = 'queued'", Done: "status = 'done'",
	PollInterval: 200 * time.Millisecond, Backoff: func(claims.Claim) time.Duration { return rand.N(300 * time.Millisecond) },
}

const (
	rowWorkers = 8  // of a process; if it has a remote worker, that one has half of them
	rowsAdded  = 20 // at once
)

// workOnRows adds rows and works on them, in a session of its own.
func (r *replica) workOnRows(ctx context.Context) error {
	store := r.backend.store()
	session, err := claims.NewSession(store, claims.SessionConfig{TTL: r.TTL, Holder: r.birth, Expiry: r.Expiry, Drain: r.drain})
	if err != nil {
		return err
	}
	queue, err := claims.NewQueue(store, workedOn)
	if err != nil {
		return err
	}
	worker, err := claims.NewWorker(session, queue)
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for pause(ctx, about(5*r.Pace)) {
			limited, cancel := context.WithTimeout(ctx, r.TTL)
			if err := r.backend.addRows(limited, 1+rand.N(rowsAdded)); err == nil {
				queue.Wake()
			}
			cancel()
		}
	})
	workers := rowWorkers
	if rand.N(2) == 0 {
		workers /= 2
		wg.Go(func() { r.workRemotely(ctx, queue, rowWorkers-workers) })
	}
	var running sync.Map
	wg.Go(func() {
		for ctx.Err() == nil {
			err := worker.Serve(ctx, workers, func(ctx context.Context, c claims.Claim) error {
				return r.workOnRow(ctx, worker.Release, queue, c, &running)
			})
			r.tellSetUp(err)
			pause(ctx, r.Pace)
		}
	})
	return session.Run(ctx)
}

// workOnRow finishes most rows, releases others, and fails for others.
func (r *replica) workOnRow(ctx context.Context, release func(context.Context, ...claims.Claim) error, queue *claims.Queue, c claims.Claim, running *sync.Map) error {
	if _, twice := running.LoadOrStore(c.Key.ID, c.Token); twice {
		r.events.write(event{Kind: claimTwice, Token: c.Token, Note: c.Key.ID})
	}
	defer running.CompareAndDelete(c.Key.ID, c.Token)
	r.events.write(event{Kind: rowBegun, Term: claimTerm(c), Token: c.Token, Note: fmt.Sprint(c.Attempt)})
	if !pause(ctx, rand.N(2*r.Pace)) {
		return context.Cause(ctx)
	}
	switch rand.N(20) {
	case 0:
		return release(ctx, c)
	case 1:
		return errors.New("this fails")
	}
	if rand.N(4) == 0 {
		r.late.Go(func() { r.finishLate(queue, c) })
	}
	e := claimEntry(ledgerRowEffect, c, fmt.Sprintf("%s.%s", r.birth, claimTerm(c)))
	for {
		limited, cancel := context.WithTimeout(ctx, r.TTL)
		err := r.backend.finish(limited, queue, c, e, rand.N(5*time.Millisecond))
		cancel()
		switch {
		case err == nil:
			r.acknowledged(e, nil)
			return nil
		case errors.Is(err, tenure.ErrLost): // or an earlier one was written, whose answer was lost
			return nil
		case !pause(ctx, about(r.Pace)):
			return context.Cause(ctx)
		}
		slog.Debug("finish", "row", c.Key.ID, "error", err)
	}
}

// finishLate finishes a row after a random time, when its claim has probably ended. Sometimes it lingers
// before it commits.
func (r *replica) finishLate(queue *claims.Queue, c claims.Claim) {
	if !pause(r.ending, about(r.TTL)*rand.N[time.Duration](3)/2) {
		return
	}
	e := claimEntry(ledgerRowEffect, c, fmt.Sprintf("%s.%s.late", r.birth, claimTerm(c)))
	if !r.lateTurn() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), r.TTL)
	err := r.backend.finish(ctx, queue, c, e, rand.N(50*time.Millisecond))
	cancel()
	<-r.lateTurns
	r.acknowledged(e, err)
}
