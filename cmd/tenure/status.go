//go:build unix

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/reach"
)

var statusCommand = command{
	name:     "status",
	synopsis: "-store STORE -key NAME [-json]",
	summary:  "show who holds a lease",
	about: `
Status shows what the store knows about a lease: who holds it, since when, and when it was
last renewed. A lease that is not renewed expires, and then any replica may take it.
The store does not record the term's token itself, but a number that it cannot exceed.
NATS and etcd have no clock: there, how long ago a renewal was is by the clocks of its
host and of this one. Replicas don't go by that. Etcd does not know of leases that were
released.

The exit status is 0 if the lease is held, 3 if it is free: released, offered or expired,
and 4 if the store knows nothing of it: it was never held, or released over a day ago.`,
	define: func(flags *flag.FlagSet) action {
		var l lookup
		l.define(flags)
		return func(ctx context.Context, out *output, args []string) error {
			return l.reading(ctx, out, args, func(ctx context.Context, store database, out *output) error {
				view, err := readLease(ctx, store, l.key.key())
				if err == nil && view.State == stateFree {
					view.State, err = l.freeOrUnused(ctx, store)
				}
				if err != nil {
					return err
				}
				if l.json {
					err = writeJSON(out.stdout, view)
				} else {
					err = view.print(out.stdout)
				}
				return cmp.Or(err, view.exitStatus())
			})
		}
	},
}

var listCommand = command{
	name:     "list",
	synopsis: "-store STORE [-type TYPE | -sessions] [-json]",
	summary:  "show all leases of one type, or all sessions",
	about: `
List shows the leases of one type, sorted by name: those that are held, and those that
have expired without being released.

With -sessions it shows the sessions of package claims, with what each of them owns. It
counts up to 100,000 keys of each kind, and then prints 100000+.`,
	define: func(flags *flag.FlagSet) action {
		var store storeFlag
		store.define(flags)
		kind := flags.String("type", defaultType, "`TYPE` of the leases' keys")
		sessions := flags.Bool("sessions", false, "list the sessions of package claims, with how many keys each owns")
		asJSON := flags.Bool("json", false, "print a JSON array")
		return func(ctx context.Context, out *output, args []string) error {
			if len(args) > 0 {
				return unexpected(args[0])
			}
			if *kind == "" {
				return usageError("-type is empty")
			}
			if *sessions && *kind != defaultType {
				return usageError("give either -type or -sessions")
			}
			if *sessions {
				return reading(ctx, &store, out, func(ctx context.Context, store database, out *output) error {
					views, err := listSessions(ctx, store)
					if err != nil {
						return err
					}
					if *asJSON {
						return writeJSON(out.stdout, views)
					}
					return printSessions(out.stdout, views)
				})
			}
			return reading(ctx, &store, out, func(ctx context.Context, store database, out *output) error {
				views, err := listLeases(ctx, store, *kind)
				if err != nil {
					return err
				}
				if *asJSON {
					return writeJSON(out.stdout, views)
				}
				if len(views) == 0 {
					fmt.Fprintf(out.stderr, "no leases of type %s; -type TYPE lists another\n", printable(*kind))
				}
				return printList(out.stdout, views)
			})
		}
	},
}

// lookup holds the flags that all commands on one lease share.
type lookup struct {
	store storeFlag
	key   keyFlag
	json  bool
}

func (l *lookup) define(flags *flag.FlagSet) {
	l.store.define(flags)
	l.key.define(flags)
	flags.BoolVar(&l.json, "json", false, "print JSON")
}

// on opens the store and calls fn with it.
func (l *lookup) on(ctx context.Context, args []string, fn func(context.Context, database) error) error {
	if err := l.validate(args); err != nil {
		return err
	}
	return withStore(ctx, &l.store, fn)
}

// reading is on for a command that only reads.
func (l *lookup) reading(ctx context.Context, out *output, args []string, fn func(context.Context, database, *output) error) error {
	if err := l.validate(args); err != nil {
		return err
	}
	return reading(ctx, &l.store, out, fn)
}

func (l *lookup) validate(args []string) error {
	if len(args) > 0 {
		return unexpected(args[0])
	}
	return l.key.validate()
}

// withStore opens a store, which must exist, and calls fn with it. All of that must take
// less than storeTimeout.
func withStore(ctx context.Context, flag *storeFlag, fn func(context.Context, database) error) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	store, err := flag.openExisting(ctx)
	if err == nil {
		defer store.Close()
		err = explain(store, fn(ctx, store))
	}
	return answered(ctx, err)
}

// answered says that a store does not answer if that is why a command has failed.
func answered(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("the store does not answer: %w", err)
	}
	return err
}

// reading is withStore for a command that only reads, by a user who may do no more. What fn writes
// is shown when it is known to be whole.
func reading(ctx context.Context, flag *storeFlag, out *output, fn func(context.Context, database, *output) error) error {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	for {
		var stdout, stderr bytes.Buffer
		store, stands, done, err := flag.openToRead(ctx)
		if err != nil {
			return answered(ctx, err)
		}
		err = explain(store, fn(ctx, store, &output{stdout: &stdout, stderr: &stderr}))
		whole := stands()
		done()
		if !whole && ctx.Err() == nil {
			continue // somebody has written meanwhile
		}
		_, failed := out.stdout.Write(stdout.Bytes())
		out.stderr.Write(stderr.Bytes())
		return cmp.Or(answered(ctx, err), failed)
	}
}

// explain adds to an error of the store what the store knows besides.
func explain(store database, err error) error {
	if s, ok := store.(interface{ explain(error) error }); ok && err != nil {
		return s.explain(err)
	}
	return err
}

// The states of a lease, as the store sees them.
const (
	stateHeld    = "held"
	stateExpired = "expired" // any replica may take it
	stateOffered = "offered" // the last holder has released it to a replica that has not taken it yet
	stateFree    = "free"
	stateUnused  = "unused" // free, and the store knows of no earlier term; only status tells
)

// The exit statuses of tenure status for a lease that nobody holds.
const (
	exitFree   = 3
	exitUnused = 4
)

func (v leaseView) exitStatus() error {
	switch v.State {
	case stateHeld:
		return nil
	case stateUnused:
		return exitStatus(exitUnused)
	default:
		return exitStatus(exitFree)
	}
}

// freeOrUnused returns the state of a lease that has no record, by whether the store has a
// tombstone of one.
func (l *lookup) freeOrUnused(ctx context.Context, store database) (string, error) {
	table, key := cmp.Or(l.store.table, "objects")+objects.TombstonesSuffix, l.key.key()
	const query = `SELECT EXISTS (SELECT 1 FROM %s WHERE object_type = $1 AND id = $2)`
	var known bool
	var err error
	switch store := store.(type) {
	case *tenure.PostgresStore:
		name := pgx.Identifier{table}
		if l.store.schema != "" {
			name = pgx.Identifier{l.store.schema, table}
		}
		err = store.Pool().QueryRow(ctx, fmt.Sprintf(query, name.Sanitize()), key.Type, key.ID).Scan(&known)
		if errors.As(err, new(*pgconn.PgError)) {
			known, err = true, nil // leases do without tombstones, or the right to read them, so nobody can tell
		}
	case *etcdStore:
		known = true // nobody can tell
	case *natsStore:
		known, err = reach.InNATS(ctx, store.Store, objects.ID(key)) // which a user who may only read can tell
	case *tenure.SQLiteStore:
		err = store.DB().QueryRowContext(ctx, fmt.Sprintf(query, pgx.Identifier{table}.Sanitize()), key.Type, key.ID).Scan(&known)
	}
	if known {
		return stateFree, err
	}
	return stateUnused, err
}

// clockOfHolder is the Clock of a lease in a store that has none.
const clockOfHolder = "holder"

// leaseView is a lease as the commands show it to people and programs.
type leaseView struct {
	Key        string            `json:"key"`
	State      string            `json:"state"`
	Holder     string            `json:"holder,omitempty"`
	OfferedTo  string            `json:"offered_to,omitempty"`
	Term       string            `json:"term,omitempty"`
	MaxToken   int64             `json:"max_token,omitempty"`   // the term's token is at most this
	AcquiredAt *time.Time        `json:"acquired_at,omitempty"` // by the holder's clock
	RenewedAt  *time.Time        `json:"renewed_at,omitempty"`  // by the store's clock, or as Clock says
	Clock      string            `json:"clock,omitempty"`       // "holder": the store has none, so the age is by the holder's clock and this host's
	AgeMS      int64             `json:"age_ms"`                // since the last renewal
	TTLMS      int64             `json:"ttl_ms"`
	Labels     map[string]string `json:"labels,omitempty"`
}

// readLease reads a lease from the store. It is not an error if nobody holds it.
func readLease(ctx context.Context, store tenure.Store, key tenure.Key) (leaseView, error) {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return leaseView{}, asUsage(err)
	}
	holding, err := lease.Read(ctx)
	if errors.Is(err, tenure.ErrNotFound) {
		return leaseView{Key: key.String(), State: stateFree}, nil
	}
	if err != nil {
		return leaseView{}, err
	}
	return newLeaseView(holding, isClockless(store)), nil
}

// isClockless reports whether the store can't tell ages.
func isClockless(store tenure.Store) bool {
	s, ok := store.(tenure.Clockless)
	return ok && s.Clockless()
}

func newLeaseView(h tenure.Holding, clockless bool) leaseView {
	if clockless {
		h.Age = time.Since(h.RenewedAt)
	}
	view := leaseView{
		Key:       h.Key.String(),
		State:     stateHeld,
		Holder:    h.Holder,
		OfferedTo: h.OfferedTo,
		Term:      h.Term,
		RenewedAt: &h.RenewedAt,
		AgeMS:     h.Age.Milliseconds(),
		TTLMS:     h.TTL.Milliseconds(),
		Labels:    h.Labels,
	}
	if clockless {
		view.Clock = clockOfHolder
	}
	if h.Term != "" && h.Holder != "" {
		view.MaxToken = h.Version
	}
	switch {
	case h.Age >= h.TTL:
		view.State = stateExpired
	case h.Holder == "":
		view.State = stateOffered
	}
	if !h.AcquiredAt.IsZero() {
		view.AcquiredAt = &h.AcquiredAt
	}
	return view
}

func listLeases(ctx context.Context, store tenure.Store, kind string) ([]leaseView, error) {
	views := []leaseView{} // not nil, so that JSON has an empty array
	for obj, err := range tenure.List(ctx, store, kind) {
		if err != nil {
			return nil, err
		}
		view, err := readLease(ctx, oneObject{obj: obj, clockless: isClockless(store)}, obj.Key) // without reading it from the store again
		if err != nil {
			return nil, err
		}
		views = append(views, view)
	}
	return views, nil
}

// oneObject is a read-only store of one object.
type oneObject struct {
	tenure.Store
	obj       tenure.Object
	clockless bool
}

func (s oneObject) Clockless() bool { return s.clockless }

func (s oneObject) Get(context.Context, tenure.Key) (tenure.Object, error) { return s.obj, nil }

func (v leaseView) print(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(table, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	line("lease", "%s", printable(v.Key))
	switch v.State {
	case stateFree:
		line("state", "free: nobody holds it")
		return table.Flush()
	case stateUnused:
		line("state", "unused: the store knows nothing of it; is the key right?")
		return table.Flush()
	}
	line("state", "%s", v.expiry())
	if v.Holder != "" {
		line("holder", "%s", printable(v.Holder))
	}
	if v.AcquiredAt != nil {
		line("since", "%s (%v)", v.AcquiredAt.Local().Format(time.DateTime), v.heldFor())
	}
	by := ""
	if v.Clock == clockOfHolder {
		by = " by the holder's clock"
	}
	line("renewed", "%v ago%s, TTL %v", ms(v.AgeMS).Round(100*time.Millisecond), by, ms(v.TTLMS))
	if v.Term != "" {
		line("term", "%s", printable(v.Term))
	}
	if v.MaxToken != 0 {
		line("token", "at most %d", v.MaxToken)
	}
	for _, name := range slices.Sorted(maps.Keys(v.Labels)) {
		line("label", "%s=%s", printable(name), printable(v.Labels[name]))
	}
	return table.Flush()
}

// printable makes what others have written to the store safe to print: it quotes a string
// that has control characters or could be taken for the end of a line or a column, and
// cuts a very long one.
func printable(s string) string {
	const most = 256
	more := ""
	if len(s) > most {
		s, more = strings.ToValidUTF8(s[:most], ""), "…"
	}
	if strings.Contains(s, "  ") || !utf8.ValidString(s) || strings.ContainsFunc(s, unprintable) {
		s = strconv.Quote(s)
	}
	return s + more
}

func unprintable(r rune) bool { return !unicode.IsPrint(r) }

// expiry describes the state, and how long it lasts.
func (v leaseView) expiry() string {
	left := v.left()
	switch v.State {
	case stateExpired:
		return fmt.Sprintf("expired %v ago, any replica may take it", -left)
	case stateOffered:
		if v.OfferedTo == "" {
			return "offered, any replica may take it"
		}
		return fmt.Sprintf("offered to %s, any replica may take it in %v", printable(v.OfferedTo), left)
	}
	return fmt.Sprintf("held, expires in %v unless renewed", left)
}

// left returns how long it is until a lease expires.
func (v leaseView) left() time.Duration {
	return (ms(v.TTLMS) - ms(max(0, v.AgeMS))).Round(100 * time.Millisecond) // the age is negative if the renewal is stamped ahead of the clock
}

func (v leaseView) heldFor() time.Duration {
	if v.AcquiredAt == nil {
		return 0
	}
	return max(0, time.Since(*v.AcquiredAt)).Round(time.Second)
}

func printList(w io.Writer, views []leaseView) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "LEASE\tHOLDER\tFOR\tSTATE")
	for _, v := range views {
		fmt.Fprintln(table, strings.Join([]string{printable(v.Key), printable(v.Holder), v.heldFor().String(), v.expiry()}, "\t"))
	}
	return table.Flush()
}

func writeJSON(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }
