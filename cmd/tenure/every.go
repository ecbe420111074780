//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/pace"
)

// lastRun is the payload of the object that the store keeps for a lease under --every.
type lastRun struct {
	Began time.Time `json:"began"` // the last run that has succeeded, by the store's clock; zero: none has
}

// oncePer runs a job, unless --every was given and the run that this command is for has succeeded already, on whichever host.
// The command may have waited for that run, so what counts is when the command began.
func (r *runner) oncePer(ctx context.Context, store tenure.Store, job func(context.Context) error) error {
	if r.opts.every == 0 {
		return job(ctx)
	}
	store, err := tenure.Fence(store, tenure.TermFromContext(ctx))
	if err != nil {
		return err
	}
	key := tenure.Key{Type: "tenure.run", ID: r.opts.key().String()}
	obj, err := store.Get(ctx, key)
	if errors.Is(err, tenure.ErrNotFound) {
		obj, err = store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte("{}")}, tenure.IfAbsent()) // which tells the store's time
	}
	if err != nil {
		return err
	}
	var last lastRun
	if err := json.Unmarshal(obj.Payload, &last); err != nil {
		return fmt.Errorf("the object %s does not say when the program last ran: delete it: %w", key, err)
	}
	now := obj.UpdatedAt.Add(obj.Age)
	if last.Began.After(now.Add(-time.Since(r.began) - r.opts.every/2)) {
		r.log.Info("not running the program: a run has succeeded already", "began", last.Began)
		r.onceEnded = &ending{}
		r.shutdown(nil)
		return nil
	}
	jobErr := job(ctx)
	if r.onceEnded == nil || r.onceEnded.Told || r.onceEnded.Status != 0 {
		return jobErr
	}
	obj.Payload, _ = json.Marshal(lastRun{Began: now.UTC()}) // a time of the store always encodes
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	for {
		_, err := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
		if err == nil || errors.Is(err, tenure.ErrConflict) { // with an earlier call whose answer was lost: only this term writes it
			return jobErr
		}
		if errors.Is(err, tenure.ErrLost) || !pace.Sleep(ctx, pace.Jitter(storeTimeout/10)) {
			r.log.Error("failed to note that the program has run; another host may run it again", "error", oneLine(err))
			return jobErr
		}
	}
}
