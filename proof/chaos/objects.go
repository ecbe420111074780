package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
)

// objectsBackend is a replica's access to a store that has objects and nothing else. What is a
// row of the ledger in a database is a write of an object here: the store's own history has all
// writes, in the order of the commits, and [ledgerOf] makes the ledger of it.
type objectsBackend struct {
	objects tenure.Store
	closed  func() error // closes the store
}

// noted is the ID of the object that the jobs of all replicas write, one type of it with a fence and
// another without.
const noted = "noted"

func (b *objectsBackend) store() tenure.Store { return b.objects }
func (b *objectsBackend) close() error        { return b.closed() }

// fenced has no transaction that it could keep open, so it lets the time pass before the write. Then
// the write is to an object that no other term writes, so that only the fence can refuse it.
func (b *objectsBackend) fenced(ctx context.Context, guard tenure.Guard, e entry, delay time.Duration) error {
	id := noted
	if delay > 0 {
		id = e.term
		pause(ctx, delay)
	}
	return putFenced(ctx, b.objects, id, guard, e)
}

func (b *objectsBackend) unfenced(ctx context.Context, e entry) error {
	return putEntry(ctx, b.objects, tenure.Key{Type: unfencedType, ID: noted}, e)
}

func (b *objectsBackend) addRows(context.Context, int) error { return errors.ErrUnsupported }

func (b *objectsBackend) lastNote(context.Context, string) (string, error) {
	return "", errors.ErrUnsupported
}

func (b *objectsBackend) finish(context.Context, *claims.Queue, claims.Claim, entry, time.Duration) error {
	return errors.ErrUnsupported
}

// objectsOnly stands in for the part of a [database] that a store of objects alone does not have.
type objectsOnly struct{}

func (objectsOnly) texts(context.Context, string) ([]string, error) {
	return nil, errors.ErrUnsupported
}

// renewObjectAsCopy renews the lease's record without changing its payload, and returns its term and version.
func renewObjectAsCopy(store tenure.Store) func(context.Context) (string, int64, error) {
	return func(ctx context.Context) (string, int64, error) {
		for {
			obj, err := store.Get(ctx, tenure.Key{Type: leaseType, ID: "singleton"})
			if errors.Is(err, tenure.ErrNotFound) {
				return "", 0, nil
			}
			if err == nil {
				obj, err = store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
			}
			if err == nil {
				term, err := termIn(obj.Payload)
				return term, obj.Version, err
			}
			if !errors.Is(err, tenure.ErrConflict) {
				return "", 0, err
			}
		}
	}
}

// termIn returns the term in the payload of a lease's record.
func termIn(payload []byte) (string, error) {
	var record struct {
		Term string `json:"term"`
	}
	if err := json.Unmarshal(payload, &record); err != nil || record.Term == "" {
		return "", fmt.Errorf("no term in the record %q: %w", payload, err)
	}
	return record.Term, nil
}

// change is one write of an object in a store's history.
type change struct {
	key     tenure.Key
	payload []byte // nil: it was deleted
	version int64
	at      time.Time // by this host's clock, as the server or the writer has it; zero: unknown
}

// decodeChange decodes an object as natstenure and etcdtenure store it: one line of JSON, and the payload.
func decodeChange(value []byte) (change, error) {
	line, payload, _ := bytes.Cut(value, []byte("\n"))
	var is struct {
		Type    string `json:"type"`
		ID      string `json:"id"`
		Updated int64  `json:"updated_us"`
		Deleted bool   `json:"deleted"`
	}
	if err := json.Unmarshal(line, &is); err != nil {
		return change{}, fmt.Errorf("the object %q can't be read: %w", value, err)
	}
	c := change{key: tenure.Key{Type: is.Type, ID: is.ID}, at: time.UnixMicro(is.Updated)}
	if !is.Deleted {
		c.payload = append([]byte{}, payload...)
	}
	return c, nil
}

// standing returns the terms of the records of leases after these changes, by lease.
func standing(history []change) (terms map[string]string, err error) {
	terms = map[string]string{}
	for _, c := range history {
		if c.key.Type != leaseType {
			continue
		}
		if delete(terms, c.key.ID); c.payload == nil {
			continue
		}
		if terms[c.key.ID], err = termIn(c.payload); err != nil {
			return nil, err
		}
	}
	return terms, nil
}

// auditOf returns what a complete history and the objects that are left say.
func auditOf(ctx context.Context, history []change, store tenure.Store) (*audit, error) {
	ledger, err := ledgerOf(history, 0)
	if err != nil {
		return nil, err
	}
	a := &audit{fit: true, ledger: ledger}
	return a, a.readObjects(ctx, store)
}

// ledgerOf returns the entries that triggers would have written, except for the first changes.
func ledgerOf(history []change, without int) (ledger []entry, err error) {
	now := map[tenure.Key]change{}
	for i, c := range history {
		before, again := now[c.key], bytes.Equal(now[c.key].payload, c.payload)
		now[c.key] = c
		e := entry{lease: c.key.ID, token: c.version}
		if !c.at.IsZero() {
			e.at = c.at.Format(time.StampMicro)
		}
		switch {
		case before.payload == nil && c.payload == nil:
			continue
		case before.payload != nil && again && before.version == c.version: // a fence of MySQL, or a wake
			continue
		case c.key.Type == leaseType:
			payload := c.payload
			switch {
			case c.payload == nil:
				e.kind, e.token, payload = ledgerEnd, before.version, before.payload
			case before.payload != nil && again:
				e.kind, e.note = ledgerRenewed, fmt.Sprint(c.at.UnixMilli())
			default:
				e.kind = ledgerBegin
			}
			e.term, err = termIn(payload)
		case c.key.Type == fencedType || c.key.Type == unfencedType:
			if again {
				continue
			}
			var said putPayload
			err = json.Unmarshal(c.payload, &said)
			e = entry{kind: c.key.Type, term: said.Term, token: said.Token, note: said.Note, at: e.at}
		default:
			continue
		}
		if err != nil {
			return nil, err
		}
		if i >= without {
			ledger = append(ledger, e)
		}
	}
	return ledger, nil
}
