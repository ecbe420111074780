package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

const atOnce = 8 // how many tasks a worker works on at the same time

// worker is a process that reaches the servers, and no database.
type worker struct {
	servers []string
	do      func(ctx context.Context, payload string) (string, error)
	sending context.Context // ends a while after that of run

	mu      sync.Mutex
	have    map[claims.Claim]bool
	dropped chan struct{} // receives when a claim was dropped
}

func newWorker(servers []string, do func(context.Context, string) (string, error)) *worker {
	return &worker{servers: servers, do: do, have: make(map[claims.Claim]bool), dropped: make(chan struct{}, 1)}
}

// run works until ctx is done. When a session is lost, all work under it has returned before
// the next session begins.
func (w *worker) run(ctx context.Context) {
	var cancel context.CancelFunc
	w.sending, cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(ttl, cancel) })()
	for ctx.Err() == nil {
		var s session
		sent := time.Now()
		if err := w.call(ctx, "/begin", tenure.ReplicaID(), &s); err != nil {
			log.Print(err)
			sleep(ctx, time.Second)
			continue
		}
		log.Printf("began session %s", s.ID)
		w.work(ctx, s, sent)
	}
}

// work works on tasks until ctx is done or the session is lost.
func (w *worker) work(ctx context.Context, s session, sent time.Time) {
	live, lose := context.WithCancel(ctx)
	defer lose()
	go w.renew(live, lose, s, sent)
	var running sync.WaitGroup
	for live.Err() == nil {
		have := w.has()
		if len(have) == atOnce {
			select {
			case <-w.dropped:
			case <-live.Done():
			}
			continue
		}
		var got []task
		if err := w.call(live, "/claim", claim{Session: s.ID, N: atOnce - len(have), Have: have}, &got); err != nil && live.Err() == nil {
			log.Print(err)
			sleep(live, patience)
		}
		for _, t := range got {
			w.keep(t.Claim)
			running.Go(func() { w.workOn(live, t) })
		}
	}
	running.Wait()
	if ctx.Err() != nil {
		if err := w.call(w.sending, "/goodbye", s, nil); err != nil {
			log.Print(err)
		}
	}
}

// renew sends heartbeats, and calls lose once the worker cannot be sure that its session is
// alive: a TTL, less a margin, after it sent the last heartbeat that was answered.
func (w *worker) renew(ctx context.Context, lose func(), s session, sent time.Time) {
	const trusted = ttl - ttl/30 // clocks may differ in their rates
	trust := time.AfterFunc(time.Until(sent.Add(trusted)), lose)
	for sleep(ctx, ttl/3) {
		sent := time.Now()
		err := w.call(ctx, "/heartbeat", s, nil)
		if errors.Is(err, errRefused) {
			log.Printf("lost session %s", s.ID)
			lose()
		}
		if err == nil {
			trust.Reset(time.Until(sent.Add(trusted)))
		}
	}
}

func (w *worker) workOn(ctx context.Context, t task) {
	defer w.drop(t.Claim)
	text, err := w.do(ctx, t.Payload)
	// The database decides whether the result comes too late.
	switch back := (giveBack{Claims: []claims.Claim{t.Claim}, After: time.Second}); {
	case err == nil:
		err = w.call(w.sending, "/submit", []result{{t.Claim, text}}, nil)
	case ctx.Err() != nil:
		err = w.call(w.sending, "/abandon", back, nil)
	default:
		log.Printf("%s: %v", t.Claim, err)
		err = w.call(w.sending, "/nack", back, nil)
	}
	if err != nil {
		log.Printf("%s: %v", t.Claim, err)
	}
}

func (w *worker) has() []claims.Claim {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Keys(w.have))
}

func (w *worker) keep(c claims.Claim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.have[c] = true
}

func (w *worker) drop(c claims.Claim) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.have, c)
	select {
	case w.dropped <- struct{}{}:
	default:
	}
}

// errRefused stands for the status 409.
var errRefused = errors.New("refused: the claim or session has ended")

// call sends a request to servers chosen at random, until one answers or ctx is done.
func (w *worker) call(ctx context.Context, path string, in, out any) error {
	for {
		err := post(ctx, w.servers[rand.IntN(len(w.servers))]+path, in, out)
		if err == nil || errors.Is(err, errRefused) {
			return err
		}
		if !sleep(ctx, patience/4) {
			return err
		}
	}
}

func post(ctx context.Context, url string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
		if out == nil {
			out = new(any)
		}
		return json.NewDecoder(response.Body).Decode(out)
	case http.StatusConflict:
		return errRefused
	}
	text, _ := io.ReadAll(response.Body)
	return fmt.Errorf("%s: %s: %s", url, response.Status, text)
}

// sleep reports whether d has passed before ctx was done.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
