package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// step is called before each step. The test ends the process there.
var step = func() {}

// order is the program of a run. It is called again from its beginning whenever another process
// takes over the run, so it may depend only on its journal.
func order(ctx context.Context, j *journal) error {
	if err := j.read(ctx); err != nil {
		return err
	}
	receipt, err := j.call(ctx, "charge")
	if err != nil {
		return err
	}
	parcel, err := j.call(ctx, "ship")
	if err != nil {
		return err
	}
	if _, finished := j.events["finished"]; !finished {
		err = j.add(ctx, "finished", receipt+", "+parcel)
	}
	step()
	return err // nil: the worker ends the run
}

// journal has the events of a run.
type journal struct {
	store    tenure.Database
	provider provider
	claim    claims.Claim
	events   map[string]string // data by name
}

// read reads what has happened so far. From now on only this driver adds to it.
func (j *journal) read(ctx context.Context) error {
	rows, err := j.store.DB().QueryContext(ctx, `SELECT name, data FROM events WHERE run = $1`, j.claim.Key.ID)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var name, data string
		if err := rows.Scan(&name, &data); err != nil {
			return err
		}
		j.events[name] = data
	}
	return rows.Err()
}

// add adds an event, in a transaction that the run's claim fences. If another driver has the run
// already, nothing is written. If the answer is lost, the next driver finds out whether the event was
// written.
func (j *journal) add(ctx context.Context, name, data string) error {
	step()
	// A write that was cut off because the driver is told to stop might have taken place, or not.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), ttl)
	defer cancel()
	err := tenure.FencedTx(ctx, j.store, j.claim, j.store.DB(), nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO events (run, name, data) VALUES ($1, $2, $3)`, j.claim.Key.ID, name, data)
		return err
	})
	if err != nil {
		return fmt.Errorf("add %q to the journal of %s: %w", name, j.claim, err)
	}
	j.events[name] = data
	return nil
}

// call makes a call to the provider and returns its outcome, or returns the outcome that the
// journal has. Drivers that are killed make a call once altogether. A driver that was paused may
// make its call late, at the same moment as another, so the provider must know calls by their keys.
func (j *journal) call(ctx context.Context, name string) (outcome string, err error) {
	if outcome, done := j.events[name+" done"]; done {
		return outcome, nil
	}
	key := j.claim.Key.ID + "/" + name
	if _, dispatched := j.events[name+" dispatched"]; dispatched { // by a driver that did not record its outcome
		outcome, err = j.provider.find(key)
	} else {
		err = j.add(ctx, name+" dispatched", "")
	}
	if err == nil && outcome == "" {
		step()
		outcome, err = j.provider.call(key)
	}
	if err != nil { // the next driver finds out whether it was made
		return "", err
	}
	return outcome, j.add(ctx, name+" done", outcome)
}
