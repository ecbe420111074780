package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/tenurelib/tenure"
)

// job is the work that only one replica may do at a time. It writes to the ledger until it
// is told to return, and then takes a moment to do so.
func (r *replica) job(ctx context.Context) error {
	term := tenure.TermFromContext(ctx)
	wrong, unlock, err := r.lock(term)
	if err != nil {
		return err
	}
	r.events.write(event{Kind: jobStarted, Term: term.ID(), Token: term.Token(), Note: wrong, Until: trustedUntil(term)})
	r.tellIfOut(ctx, "the job")
	defer func() {
		unlock()
		stopped := event{Kind: jobStopped, Term: term.ID(), Token: term.Token()}
		if cause := context.Cause(ctx); cause != nil {
			stopped.Note = cause.Error()
		}
		r.events.write(stopped)
	}()
	r.late.Go(func() { r.writeLate(term) })
	for n := 0; pause(ctx, about(r.Pace)); n++ {
		note := fmt.Sprintf("%s.%d.%d", r.birth, term.Token(), n)
		limited, cancel := context.WithTimeout(ctx, r.TTL)
		var err error
		e := entry{kind: ledgerFenced, term: term.ID(), token: term.Token(), note: note}
		switch n % 3 {
		case 0:
			e.kind = ledgerUnfenced
			err = r.backend.unfenced(limited, e)
		case 1:
			err = r.backend.fenced(limited, term, e, 0)
		case 2:
			err = putFenced(limited, r.backend.store(), r.Name, term, e)
		}
		cancel()
		r.acknowledged(e, err)
		if rand.IntN(2000) == 0 {
			return errors.New("the job ends by itself")
		}
	}
	time.Sleep(rand.N(r.TTL / 20))
	return nil
}

// trustedUntil returns until when a term is trusted if it is not renewed again, or an earlier time; 0 if it is over.
func trustedUntil(term *tenure.Term) time.Duration {
	now := monotonic()
	left := term.Remaining()
	if left == 0 {
		return 0
	}
	return now + left
}

// writeLate makes fenced writes for a term, regardless of the job's context, until one fails
// because the term is over. It tries what a former holder must not be able to do.
func (r *replica) writeLate(term *tenure.Term) {
	for n := 0; n < 1000 && r.ending.Err() == nil; n++ {
		e := entry{kind: ledgerFenced, term: term.ID(), token: term.Token(), note: fmt.Sprintf("%s.%d.late.%d", r.birth, term.Token(), n)}
		ctx, cancel := context.WithTimeout(context.Background(), 2*r.TTL)
		err := r.backend.fenced(ctx, term, e, rand.N(200*time.Millisecond))
		cancel()
		if errors.Is(err, tenure.ErrLost) {
			return
		}
		r.acknowledged(e, err)
		time.Sleep(rand.N(r.Pace))
	}
}

// acknowledged reports that an entry was written, unless there was an error.
func (r *replica) acknowledged(e entry, err error) {
	if err == nil {
		r.events.write(event{Kind: acknowledge, Note: e.kind + " " + e.note})
	}
}

// putPayload is the payload of an object that a job writes, through a fence or not; a trigger, or
// [ledgerOf], copies it to the ledger.
type putPayload struct {
	Term  string `json:"term"`
	Token int64  `json:"token"`
	Note  string `json:"note"`
}

func (e entry) payload() ([]byte, error) {
	return json.Marshal(putPayload{Term: e.term, Token: e.token, Note: e.note})
}

func putFenced(ctx context.Context, store tenure.Store, id string, guard tenure.Guard, e entry) error {
	fenced, err := tenure.Fence(store, guard)
	if err != nil {
		return err
	}
	return putEntry(ctx, fenced, tenure.Key{Type: fencedType, ID: id}, e)
}

func putEntry(ctx context.Context, store tenure.Store, key tenure.Key, e entry) error {
	payload, err := e.payload()
	if err != nil {
		return err
	}
	_, err = store.PutIf(ctx, tenure.Object{Key: key, Payload: payload}, tenure.Unconditional())
	return err
}
