//go:build unix

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// countClaimsTo is how far the claims of one session on keys of one kind are counted. On
// Postgres, 100,000 rows that were claimed a moment ago take a third of a second.
const countClaimsTo = 100_000

// stateGone is the state of a session without a record, and of what it owned: that is free.
const stateGone = "gone"

func ownerCommand(out *output) *cobra.Command {
	o := &options{}
	c := &cobra.Command{
		Use:   "owner --store STORE --key KIND/ID",
		Short: "show which session owns a key (package claims)",
		Long: `Owner shows who owns a key of package claims, or a row of a queue, with the table as KIND:
the session, its process's name and labels, and the claim's token.

The exit status is 0 if the key is owned; 3 if it is free, because it was released or its
owner's session has expired or is gone; and 4 if the store knows nothing of the key, because
it was never claimed or has been free for more than a day. The store knows a queue once a
session has taken a row of it.`,
		PreRunE: func(*cobra.Command, []string) error {
			if kind, id, _ := strings.Cut(o.keyName, "/"); kind == "" || id == "" {
				return usageError("no key: give --key KIND/ID")
			}
			return o.checkKey()
		},
		RunE: func(c *cobra.Command, _ []string) error {
			return o.store.reading(c.Context(), out, func(ctx context.Context, store database, out *output) error {
				view, err := readOwner(ctx, store, o.key())
				if err != nil {
					return err
				}
				return cmp.Or(o.show(out, view), leaseView{State: view.State}.exitStatus())
			})
		},
	}
	o.storeFlags(c)
	c.Flags().StringVar(&o.keyName, "key", "", "the key, as `KIND/ID`")
	o.jsonFlag(c)
	return c
}

// backend is a store that has the tables for claims.
type backend interface{ Backend() objects.Backend }

func backendOf(store database) (objects.Backend, error) {
	if s, ok := store.(backend); ok {
		return s.Backend(), nil
	}
	return nil, usageError("sessions and what they own are on Postgres or SQLite only; this store has leases, which status and list show")
}

// queuesOf returns the tables of the queues that have registered themselves: those with a name, or all if it
// is empty.
func queuesOf(ctx context.Context, store database, b objects.Backend, name string) (tables []objects.RowsTable, err error) {
	for obj, err := range tenure.List(ctx, store, objects.QueueType) {
		if err != nil {
			return nil, err
		}
		var q objects.QueueRecord
		if json.Unmarshal(obj.Payload, &q) != nil || q.Table == "" || name != "" && q.Table != name {
			continue
		}
		tables = append(tables, b.Rows(objects.RowsConfig{Schema: q.Schema, Table: q.Table, ID: q.ID, Session: q.Session, Token: q.Token, ReadOnly: true}, slog.New(slog.DiscardHandler)))
	}
	return tables, nil
}

// ownerView is a key of package claims as the command shows it. Its state is that of a lease, or
// stateGone.
type ownerView struct {
	Key       string `json:"key"`
	State     string `json:"state"`
	Session   string `json:"session,omitempty"`
	Token     int64  `json:"token,omitempty"` // of the last claim
	leaseView        // of the session
}

func readOwner(ctx context.Context, store database, key tenure.Key) (ownerView, error) {
	view := ownerView{Key: key.String(), State: stateUnused}
	b, err := backendOf(store)
	if err != nil {
		return view, err
	}
	rows, err := b.Claims().Look(ctx, key.Type, []string{key.ID}, storeTimeout)
	if missing := (*objects.NoTable)(nil); errors.As(err, &missing) && missing.OfClaims {
		rows, err = nil, nil // no program uses package claims here
	}
	if err == nil && len(rows) == 0 {
		rows, err = lookInQueues(ctx, store, b, key)
	}
	if err != nil || len(rows) == 0 {
		return view, err
	}
	view.State, view.Session, view.Token = stateFree, rows[0].Session, rows[0].Token
	if view.Session == "" {
		return view, nil
	}
	// The row is read first: a record that is missing then is gone for good.
	view.leaseView, err = readLease(ctx, store, sessionKey(view.Session))
	view.State = sessionState(view.leaseView)
	return view, err
}

// lookInQueues returns the row with that ID of a table that is a queue, if there is one.
func lookInQueues(ctx context.Context, store database, b objects.Backend, key tenure.Key) (rows []objects.Claim, err error) {
	tables, err := queuesOf(ctx, store, b, key.Type)
	for _, table := range tables {
		if rows, err = table.Look(ctx, key.Type, []string{key.ID}, storeTimeout); len(rows) > 0 || err != nil {
			return rows, err
		}
	}
	return nil, err
}

func sessionKey(id string) tenure.Key { return tenure.Key{Type: objects.SessionType, ID: id} }

// sessionState returns the state of a session, by its record.
func sessionState(record leaseView) string {
	switch record.State {
	case stateFree:
		return stateGone
	case stateOffered: // no process takes a session over
		return stateExpired
	}
	return record.State
}

func (v ownerView) print(w io.Writer) error {
	table := newSheet(w)
	table.line("key", "%s", printable(v.Key))
	switch v.State {
	case stateFree:
		table.line("state", "free: nobody owns it")
	case stateUnused:
		table.line("state", "unused: the store knows nothing of it; is the key right?")
	case stateGone:
		table.line("state", "free: its owner is gone")
	case stateExpired:
		table.line("state", "free: the session of its owner has expired")
	default:
		table.line("state", "owned; its session expires in %v unless renewed", v.left())
	}
	if v.Holder != "" {
		table.line("owner", "%s", printable(v.Holder))
	}
	for _, label := range labelsOf(v.Labels) {
		table.line("label", "%s", label)
	}
	if v.Token != 0 {
		table.line("token", "%d", v.Token)
	}
	if v.Session != "" {
		table.line("session", "%s", printable(v.Session))
	}
	if v.RenewedAt != nil {
		table.line("renewed", "%v ago, TTL %v", ms(v.AgeMS).Round(100*time.Millisecond), ms(v.TTLMS))
	}
	return table.Flush()
}

// sessionView is a session as list shows it.
type sessionView struct {
	Session   string     `json:"session"`
	State     string     `json:"state"` // held, expired or gone
	leaseView            // its record
	Claims    []kindView `json:"claims"` // by kind
}

type kindView struct {
	Kind   string `json:"kind"`
	Claims int    `json:"claims"`
	More   bool   `json:"more,omitempty"` // there are more, which were not counted
}

// listSessions returns the sessions that have a record, and those that rows name, and why the rows of some
// queues can't be read. It reads the rows first: a record that is missing then is gone for good.
func listSessions(ctx context.Context, store database) (sessions sessionList, unread error, err error) {
	b, err := backendOf(store)
	if err != nil {
		return nil, nil, err
	}
	counts, err := b.Claims().Counts(ctx, countClaimsTo+1, storeTimeout)
	if err != nil {
		return nil, nil, err
	}
	queues, unread := queuesOf(ctx, store, b, "")
	for _, q := range queues {
		more, err := q.Counts(ctx, countClaimsTo+1, storeTimeout)
		counts, unread = append(counts, more...), errors.Join(unread, err)
	}
	records, err := listLeases(ctx, store, objects.SessionType)
	if err != nil {
		return nil, nil, err
	}
	byID := make(map[string]*sessionView)
	for _, record := range records {
		id := strings.TrimPrefix(record.Key, objects.SessionType+"/")
		byID[id] = &sessionView{Session: id, State: sessionState(record), leaseView: record, Claims: []kindView{}}
	}
	for _, n := range counts {
		if byID[n.Session] == nil {
			byID[n.Session] = &sessionView{Session: n.Session, State: stateGone, leaseView: leaseView{Key: sessionKey(n.Session).String()}}
		}
		v := byID[n.Session]
		v.Claims = append(v.Claims, kindView{Kind: n.Kind, Claims: min(n.Claims, countClaimsTo), More: n.Claims > countClaimsTo})
	}
	sessions = sessionList{} // not nil, so that JSON has an empty array
	for _, v := range byID {
		slices.SortFunc(v.Claims, func(a, b kindView) int { return cmp.Compare(a.Kind, b.Kind) })
		sessions = append(sessions, *v)
	}
	slices.SortFunc(sessions, func(a, b sessionView) int {
		return cmp.Or(cmp.Compare(a.Holder, b.Holder), cmp.Compare(a.Session, b.Session))
	})
	return sessions, unread, nil
}

// sessionList is what list --sessions shows.
type sessionList []sessionView

func (l sessionList) print(w io.Writer) error {
	table := newSheet(w)
	table.row("SESSION", "HOLDER", "FOR", "STATE", "CLAIMS", "LABELS")
	for _, v := range l {
		state, since := "valid, expires in "+v.left().String()+" unless renewed", v.heldFor().String()
		switch v.State {
		case stateExpired:
			state = "expired; what it owns is free"
		case stateGone:
			state, since = "gone; what it owns is free", ""
		}
		var claims []string
		for _, k := range v.Claims {
			claims = append(claims, fmt.Sprintf("%s %d%s", printable(k.Kind), k.Claims, map[bool]string{true: "+"}[k.More]))
		}
		table.row(printable(v.Session), printable(v.Holder), since, state,
			cmp.Or(strings.Join(claims, ", "), "none"), strings.Join(labelsOf(v.Labels), ", "))
	}
	return cmp.Or(table.Flush(), printShards(w, l))
}
