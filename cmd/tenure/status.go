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
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/stores/etcdtenure"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

func statusCommand(out *output) *cobra.Command {
	o := &options{}
	c := &cobra.Command{
		Use:   "status --store STORE --key NAME",
		Short: "show who holds a lease",
		Long: `Status shows what the store knows about a lease: who holds it, since when, and when it was
last renewed. A lease that is not renewed expires, and then any replica may take it.
The store does not record the term's token itself, but an upper bound.
NATS, etcd and Kubernetes have no clock: there, the age of a renewal is taken from the
holder's clock and this host's. Replicas don't rely on it. Etcd forgets leases that were
released.

If one process has a SQLite file to itself, because it was opened without Shared, its jobs
run without leases in the file, and status names that process instead. If no replica holds
the lease, status also names the replicas that are drained. For the key of a schedule, it
shows which slot was done last, and which is next.

The exit status is 0 if the lease is held; 3 if it is free, because it was released,
offered, or has expired; and 4 if the store knows nothing of it, because it was never held,
was released over a day ago, or one process has the file to itself.`,
		PreRunE: func(*cobra.Command, []string) error { return o.checkKey() },
		RunE: func(c *cobra.Command, _ []string) error {
			return o.store.reading(c.Context(), out, func(ctx context.Context, store database, out *output) error {
				view, err := readLease(ctx, store, o.key())
				if err == nil && view.State != stateFree && view.Term == "" {
					if s, ok := readSchedule(ctx, store, o.key()); ok {
						return o.show(out, s)
					}
				}
				if err == nil && view.State == stateFree {
					view.State, err = o.store.freeOrUnused(ctx, store, o.key())
				}
				if p := o.store.alone(); p != nil && view.State != stateHeld && (err == nil || errors.As(err, new(*objects.NoTable))) {
					view.Key, view.State, view.Exclusive, err = o.key().String(), stateExclusive, p, nil
				}
				if err != nil {
					return err
				}
				if view.State == stateFree || view.State == stateUnused {
					view.types = o.store.typesWith(ctx, store, o.key())
				}
				noteFailover(ctx, store, &view)
				if view.State != stateHeld {
					marks, _ := tenure.Drains(ctx, store) // some stores can't list
					for _, d := range marks {
						view.Drained = append(view.Drained, d.Replica)
					}
				}
				return cmp.Or(o.show(out, view), view.exitStatus())
			})
		},
	}
	o.leaseFlags(c)
	return c
}

// sheet is a table that Flush prints.
type sheet struct{ *tabwriter.Writer }

func newSheet(w io.Writer) sheet { return sheet{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)} }

func (s sheet) line(name, format string, args ...any) {
	fmt.Fprintf(s, "%s\t%s\n", name, fmt.Sprintf(format, args...))
}

func (s sheet) row(cells ...string) { fmt.Fprintln(s, strings.Join(cells, "\t")) }

// labelsOf returns labels as text, in the order of their names.
func labelsOf(labels map[string]string) (texts []string) {
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		texts = append(texts, printable(name)+"="+printable(labels[name]))
	}
	return texts
}

// The states of a lease, as the store sees them.
const (
	stateHeld      = "held"
	stateExpired   = "expired" // any replica may take it
	stateOffered   = "offered" // the last holder has released it to a replica that has not taken it yet
	stateFree      = "free"
	stateUnused    = "unused"    // free, and the store knows of no earlier term; only status tells
	stateExclusive = "exclusive" // one process has the SQLite file to itself, and needs no record of its leases; only status tells
)

// The exit statuses of tenure status for a lease that no replica holds.
const (
	exitFree   = 3
	exitUnused = 4
)

func (v leaseView) exitStatus() error {
	switch v.State {
	case stateHeld:
		return nil
	case stateUnused, stateExclusive:
		return exitStatus(exitUnused)
	default:
		return exitStatus(exitFree)
	}
}

// freeOrUnused returns the state of a lease that has no record, by whether the store has a
// tombstone of one.
func (s *storeFlag) freeOrUnused(ctx context.Context, store database, key tenure.Key) (string, error) {
	query := `SELECT EXISTS (SELECT 1 FROM ` + s.quotedTable(objects.TombstonesSuffix) + ` WHERE object_type = $1 AND id = $2)`
	var known bool
	var err error
	switch store := store.(type) {
	case *tenure.PostgresStore:
		err = store.Pool().QueryRow(ctx, query, key.Type, key.ID).Scan(&known)
		if errors.As(err, new(*pgconn.PgError)) {
			known, err = true, nil // leases do without tombstones, or without the right to read them, so it is unknown
		}
	case *etcdtenure.Store, *kubetenure.Store:
		known = true // they have no tombstones, so it is unknown
	case interface {
		EverExisted(context.Context, tenure.Key) (bool, error)
	}: // NATS and MySQL
		known, err = store.EverExisted(ctx, key) // which a user who may only read can tell
	case *tenure.SQLiteStore:
		err = store.DB().QueryRowContext(ctx, query, key.Type, key.ID).Scan(&known)
	}
	if known {
		return stateFree, err
	}
	return stateUnused, err
}

// typesWith returns the types of leases that have the ID of a key without a lease, in case the type is wrong. What can't be
// read in a part of the time that the command has, is left out.
func (s *storeFlag) typesWith(ctx context.Context, store database, key tenure.Key) (with []string) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout/2)
	defer cancel()
	types, _ := s.typesOf(ctx, store, mostTypes)
	slices.Sort(types)
	for _, kind := range types {
		if !mayHaveLeases(kind) {
			continue
		}
		if obj, err := store.Get(ctx, tenure.Key{Type: kind, ID: key.ID}); err == nil && isLease(obj) {
			if with = append(with, printable(kind)); len(with) == 5 { // enough to see the mistake
				break
			}
		}
	}
	return with
}

// keyHint is for a lease without a record. List has none of these.
const keyHint = "is the key right? tenure list shows the leases that are held"

// clockOfHolder is the Clock of a lease in a store without a clock.
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

	RunningSince *time.Time   `json:"running_since,omitempty"` // by the holder's clock: when a run of its job began that has lasted for a TTL
	Exclusive    *soleProcess `json:"exclusive,omitempty"`
	SettlesInMS  int64        `json:"settles_in_ms,omitempty"` // the lease has expired, and nobody takes it before, because the database has failed over
	Drained      []string     `json:"drained,omitempty"`       // the drained replicas, if the lease is not held; only status tells

	types []string // of leases with the ID of a key without one; only status tells people
}

// readLease reads a lease from the store. A lease without a holder is not an error.
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
	return newLeaseView(holding, store.Traits().Clockless), nil
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
	if !h.RunningSince.IsZero() {
		view.RunningSince = &h.RunningSince
	}
	return view
}

// noteFailover notes for how long leases that have expired are not taken, because the database has failed over. It goes by the
// age of the mark that the first replica has left, and leaves out what it can't read.
func noteFailover(ctx context.Context, store tenure.Store, views ...*leaseView) {
	views = slices.DeleteFunc(views, func(v *leaseView) bool { return v.State != stateExpired })
	if len(views) == 0 {
		return
	}
	mark, err := store.Get(ctx, tenure.Key{Type: objects.LineageType, ID: objects.LineageType})
	var is struct{ Settled bool }
	if err != nil || json.Unmarshal(mark.Payload, &is) != nil || is.Settled {
		return
	}
	for _, v := range views {
		v.SettlesInMS = max(0, v.TTLMS-mark.Age.Milliseconds())
	}
}

// viewOf returns the view of a lease whose object has been read.
func viewOf(ctx context.Context, store tenure.Store, obj tenure.Object) (leaseView, error) {
	return readLease(ctx, oneObject{obj: obj, clockless: store.Traits().Clockless}, obj.Key)
}

// oneObject is a read-only store of one object.
type oneObject struct {
	tenure.Store
	obj       tenure.Object
	clockless bool
}

func (s oneObject) Traits() tenure.Traits { return tenure.Traits{Clockless: s.clockless} }

func (s oneObject) Get(context.Context, tenure.Key) (tenure.Object, error) { return s.obj, nil }

func (v leaseView) print(w io.Writer) error {
	table := newSheet(w)
	table.line("lease", "%s", printable(v.Key))
	table.line("state", "%s", v.expiry())
	if len(v.Drained) > 0 {
		table.line("drained", "%s", printable(strings.Join(v.Drained, ", ")))
	}
	if len(v.types) > 0 {
		_, id, _ := strings.Cut(v.Key, "/")
		table.line("note", "other types have a lease %[1]s: %[2]s (is --key TYPE/%[1]s meant?)", printable(id), strings.Join(v.types, ", "))
	}
	switch v.State {
	case stateFree, stateUnused, stateExclusive: // there is no record
		return table.Flush()
	}
	if v.Holder != "" {
		table.line("holder", "%s", printable(v.Holder))
	}
	if v.AcquiredAt != nil {
		table.line("since", "%s (%v)", v.AcquiredAt.Local().Format(time.DateTime), v.heldFor())
	}
	if v.RunningSince != nil {
		table.line("running", "one run since %s (%v)", v.RunningSince.Local().Format(time.DateTime), ago(*v.RunningSince))
	}
	by := ""
	if v.Clock == clockOfHolder {
		by = " by the holder's clock"
	}
	table.line("renewed", "%v ago%s, TTL %v", ms(v.AgeMS).Round(100*time.Millisecond), by, ms(v.TTLMS))
	if v.Term != "" {
		table.line("term", "%s", printable(v.Term))
	}
	if v.MaxToken != 0 {
		table.line("token", "at most %d; renewals raise this bound, not the token", v.MaxToken)
	}
	for _, label := range labelsOf(v.Labels) {
		table.line("label", "%s", label)
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
	case stateFree:
		return "free: nobody holds it"
	case stateUnused:
		return "unused: the store knows nothing of it; " + keyHint
	case stateExclusive:
		return "exclusive: " + v.Exclusive.explain()
	case stateExpired:
		if v.SettlesInMS > 0 {
			return fmt.Sprintf("expired %v ago; the database has failed over, which is settling: any replica may take it in %v", -left, ms(v.SettlesInMS).Round(100*time.Millisecond))
		}
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

// isTaken reports whether a replica holds the lease. Where ages are by the clocks of two hosts, a lease that was just
// taken can look expired.
func (v leaseView) isTaken() bool {
	return v.State == stateHeld || v.State == stateExpired && v.Clock != "" && v.Holder != ""
}

func (v leaseView) heldFor() time.Duration {
	if v.AcquiredAt == nil {
		return 0
	}
	return ago(*v.AcquiredAt)
}

// ago returns how long ago a time was, which may be by another host's clock.
func ago(t time.Time) time.Duration { return max(0, time.Since(t)).Round(time.Second) }

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }
