package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
)

// election is one lease and its contenders, each on its own replica.
type election struct {
	peer       peer
	candidates []*candidate
	begun      chan begin // receives one value for each term
	ended      chan end   // receives one value for each job that returned

	ctx    context.Context // for all campaigns
	cancel context.CancelFunc
}

// begin reports that the job of a new term is running.
type begin struct {
	who int
	at  time.Time
}

// end reports that a job has returned.
type end begin

type candidate struct {
	replica   *replica
	contender contender
	over      chan struct{} // closed when its campaign has returned
}

// newElection opens the replicas, one for each of the options.
func newElection(ctx context.Context, p peer, name string, opts ...options) (*election, error) {
	const terms = 1000 // more than are ever left unread
	e := &election{peer: p, begun: make(chan begin, terms), ended: make(chan end, terms)}
	e.ctx, e.cancel = context.WithCancel(ctx)
	for i, o := range opts {
		o.name = fmt.Sprintf("replica-%d", i)
		r, err := p.open(ctx, o)
		if err != nil {
			e.close()
			return nil, err
		}
		over := make(chan struct{})
		close(over)
		c := &candidate{replica: r, over: over}
		e.candidates = append(e.candidates, c)
		if c.contender, err = r.contender(name); err != nil {
			e.close()
			return nil, err
		}
	}
	return e, nil
}

// campaign lets a candidate compete for one term, after a delay.
func (e *election) campaign(who int, delay time.Duration) {
	c := e.candidates[who]
	c.over = make(chan struct{})
	go func() {
		defer close(c.over)
		if pause(e.ctx, delay) != nil {
			return
		}
		c.contender.campaign(e.ctx, func(ctx context.Context) {
			e.begun <- begin{who, time.Now()}
			<-ctx.Done()
			e.ended <- end{who, time.Now()}
		})
	}()
}

var errNoTerm = errors.New("nobody began a term in time")

// next waits for the next term.
func (e *election) next(timeout time.Duration) (begin, error) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case b := <-e.begun:
		return b, nil
	case <-timer.C:
		return begin{}, errNoTerm
	case <-e.ctx.Done():
		return begin{}, e.ctx.Err()
	}
}

// open begins the first term, with the first candidate as the holder, and lets the others
// compete. Their start times are spread over their polling interval, like those of real
// replicas.
func (e *election) open() (holder int, err error) {
	e.campaign(0, 0)
	b, err := e.next(20 * time.Second)
	if err != nil {
		return 0, err
	}
	for i := range e.candidates[1:] {
		e.campaign(i+1, e.anyPhase())
	}
	return b.who, nil
}

// anyPhase returns a random time within a standby's sleep.
func (e *election) anyPhase() time.Duration {
	if e.peer.polls == 0 {
		return 0
	}
	return rand.N(e.peer.polls)
}

// handover lets the holder resign, and returns the next holder and the time from the call
// until its job ran. Then the old holder competes again.
func (e *election) handover(holder int) (next int, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(e.ctx, 30*time.Second)
	defer cancel()
	old := e.candidates[holder]
	began := time.Now()
	if err := old.contender.resign(ctx); err != nil {
		return 0, 0, fmt.Errorf("resign: %w", err)
	}
	b, err := e.next(30 * time.Second)
	if err != nil {
		return 0, 0, err
	}
	<-old.over
	e.campaign(holder, 0)
	return b.who, b.at.Sub(began), nil
}

// close ends all campaigns as a shutdown would, and closes the replicas.
func (e *election) close() {
	e.cancel()
	var wg sync.WaitGroup
	for _, c := range e.candidates {
		wg.Go(func() {
			<-c.over
			c.replica.close()
		})
	}
	wg.Wait()
}
