package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// atOnce is how many runs one process drives at the same time.
var atOnce = 8

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
	return j.finish(ctx, receipt+", "+parcel)
}

// journal has the events of a run.
type journal struct {
	queue *claims.Queue
	database
	provider string
	claim    claims.Claim
	events   []event
}

type event struct{ Name, Data string }

// read reads what has happened so far. From now on only this driver adds to it.
func (j *journal) read(ctx context.Context) error {
	rows, err := j.store.DB().QueryContext(ctx, `SELECT name, data FROM events WHERE run = $1 ORDER BY seq`, j.claim.Key.ID)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var e event
		if err := rows.Scan(&e.Name, &e.Data); err != nil {
			return err
		}
		j.events = append(j.events, e)
	}
	return rows.Err()
}

func (j *journal) find(name string) (data string, ok bool) {
	for _, e := range j.events {
		if e.Name == name {
			return e.Data, true
		}
	}
	return "", false
}

// add adds an event, in a transaction that the run's claim fences. If another driver has the run
// already, nothing is written. If the answer is lost, the next driver finds out whether the event was
// written.
func (j *journal) add(ctx context.Context, name, data string) error {
	step()
	ctx, cancel := writeContext(ctx)
	defer cancel()
	err := tenure.FencedTx(ctx, j.store, j.claim, j.store.DB(), nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, addEvent, j.row(name, data)...)
		return err
	})
	if err != nil {
		return fmt.Errorf("add %q to the journal of %s: %w", name, j.claim, err)
	}
	j.events = append(j.events, event{name, data})
	return nil
}

const addEvent = `INSERT INTO events (run, seq, name, data) VALUES ($1, $2, $3, $4)`

func (j *journal) row(name, data string) []any {
	return []any{j.claim.Key.ID, len(j.events) + 1, name, data}
}

// call makes a call to the provider and returns its outcome, or returns the outcome that the
// journal has. Drivers that are killed make a call once altogether. A driver that was paused may
// make its call late, at the same moment as another, so the provider must know calls by their keys.
func (j *journal) call(ctx context.Context, name string) (outcome string, err error) {
	if outcome, done := j.find(name + " done"); done {
		return outcome, nil
	}
	key, made := j.claim.Key.ID+"/"+name, false
	if _, dispatched := j.find(name + " dispatched"); dispatched { // by a driver that did not record its outcome
		outcome, made, err = find(ctx, j.provider, key)
	} else {
		err = j.add(ctx, name+" dispatched", "")
	}
	if err == nil && !made {
		step()
		outcome, err = call(ctx, j.provider, key)
	}
	if err != nil { // the next driver finds out whether it was made
		return "", err
	}
	return outcome, j.add(ctx, name+" done", outcome)
}

// finish writes the last event and ends the run in one transaction, unless the claim has ended.
func (j *journal) finish(ctx context.Context, result string) (err error) {
	step()
	ctx, cancel := writeContext(ctx)
	defer cancel()
	done, row := []claims.Claim{j.claim}, j.row("finished", result)
	if _, ok := j.store.(*tenure.PostgresStore); ok {
		err = j.queue.FinishPostgres(ctx, done, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, addEvent, row...)
			return err
		})
	} else {
		err = j.queue.FinishSQLite(ctx, done, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, addEvent, row...)
			return err
		})
	}
	step()
	return err
}

// writeContext returns a context for a write that is not cut off when the driver is told to
// stop: the driver would not know whether the write took place.
func writeContext(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), ttl)
}
