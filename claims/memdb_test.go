package claims_test

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/wake"
	"github.com/tenurelib/tenure/storetest"
)

// memDB is a database in memory: the records of sessions, in a storetest.Mem, and the table of
// claims. A statement that writes locks its rows, may stay open for a while, and then commits.
// It keeps the contract that TestTablesOfClaims checks, and locks as Postgres does.
type memDB struct {
	now     func() time.Time
	hub     *wake.Hub[tenure.Key]
	opens   func(ctx context.Context) time.Duration // how long a statement that writes is open
	watcher watcher
	table   *memRows // nil: there is none

	renewals objects.Renewals

	mu      sync.Mutex // guards what follows; a watcher is called under it
	records *storetest.Mem
	rows    map[rowKey]*memRow
	wanted  map[objects.Claim]bool // requested claims
	epoch   int                    // of the transactions; ends when the tables are restored

	lineages bool      // a restore begins another lineage
	marked   time.Time // when a process first looked at the lineage; zero: none has

	hintsLost bool
	refused   map[string]bool // keys whose rows a trigger refuses to have updated
}

type rowKey struct{ kind, id string }

type memRow struct {
	objects.Claim
	readers  int           // fenced transactions that have locked it
	unlocked chan struct{} // closed when the statement that has locked it ends; nil: none has
}

func (r *memRow) isLocked() bool { return r.readers > 0 || r.unlocked != nil }

// watcher is told of each write as it lands.
type watcher interface {
	recordPut(ctx context.Context, o tenure.Object)
	recordDeleted(ctx context.Context, session string)
	rowTaken(ctx context.Context, before, after objects.Claim) // a zero before: there was no row
	rowFreed(ctx context.Context, before objects.Claim)
	rowMoved(ctx context.Context, seen, before, after objects.Claim)
	noticePruned(before objects.Claim) // that its claim was moved
	wished(ctx context.Context, wish objects.Claim)
	offered(ctx context.Context, before, wish objects.Claim) // the owner of a key has moved the wish for it to itself
	fencedWrite(ctx context.Context, by objects.Claim, err error)
}

var (
	_ objects.ClaimsTable = (*memDB)(nil)
	_ objects.Backend     = (*memDB)(nil)
	_ tenure.Store        = (*memDB)(nil)
	_ tenure.Watcher      = (*memDB)(nil)
	_ tenure.Notifier     = (*memDB)(nil)
	_ tenure.Lister       = (*memDB)(nil)
)

var errRestored = errors.New("terminating connection: the tables are being restored")

func newMemDB(now func() time.Time) *memDB {
	d := &memDB{now: now, hub: wake.NewHub[tenure.Key](true), opens: func(context.Context) time.Duration { return 0 }, watcher: noWatcher{}}
	d.records, d.rows, d.wanted = d.newRecords(), make(map[rowKey]*memRow), make(map[objects.Claim]bool)
	return d
}

func (d *memDB) newRecords() *storetest.Mem {
	records := storetest.NewMem()
	records.Now = d.now
	return records
}

func (d *memDB) Backend() objects.Backend    { return d }
func (d *memDB) Renewals() *objects.Renewals { return &d.renewals }
func (d *memDB) Claims() objects.ClaimsTable { return d }

// Rows returns the one table of a user, whatever its config.
func (d *memDB) Rows(objects.RowsConfig, *slog.Logger) objects.RowsTable { return d.table }

func (d *memDB) Migrate(context.Context) error { return nil }

func (d *memDB) Counts(context.Context, int, time.Duration) ([]objects.ClaimCount, error) {
	return nil, errors.ErrUnsupported
}

func (d *memDB) locked(do func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	do()
}

func (d *memDB) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	o, err := d.records.Get(ctx, key)
	return d.stamped(o), err
}

// stamped returns an object with its times in milliseconds, as the databases keep them.
func (d *memDB) stamped(o tenure.Object) tenure.Object {
	o.CreatedAt, o.UpdatedAt = o.CreatedAt.Truncate(time.Millisecond), o.UpdatedAt.Truncate(time.Millisecond)
	if o.Version != 0 {
		o.Age = objects.Age(stamp(o.UpdatedAt), d.now())
	}
	return o
}

func stamp(t time.Time) sql.NullInt64 { return sql.NullInt64{Int64: t.UnixMilli(), Valid: true} }

func (d *memDB) PutIf(ctx context.Context, o tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	stored, err := d.records.PutIf(ctx, o, cond)
	if err == nil {
		d.watcher.recordPut(ctx, stored)
	}
	return d.stamped(stored), err
}

func (d *memDB) DeleteIf(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.records.DeleteIf(ctx, key, cond)
	if err == nil {
		d.watcher.recordDeleted(ctx, key.ID)
	}
	return err
}

func (d *memDB) DeleteAndWake(ctx context.Context, key tenure.Key, cond tenure.WriteCondition) error {
	err := d.DeleteIf(ctx, key, cond)
	if err == nil {
		_ = d.Wake(ctx, key)
	}
	return err
}

func (d *memDB) List(ctx context.Context, objectType, after string, limit int) ([]tenure.Object, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list, err := d.records.List(ctx, objectType, after, limit)
	for i, o := range list {
		list[i] = d.stamped(o)
	}
	return list, err
}

func (d *memDB) Watch(key tenure.Key) tenure.Subscription { return d.hub.Watch(key) }

func (d *memDB) Wake(_ context.Context, key tenure.Key) error {
	var lost bool
	d.locked(func() { lost = d.hintsLost })
	if !lost {
		d.hub.Wake(key)
	}
	return nil
}

// record returns the record of a session, as it stands now. The caller holds the mutex.
func (d *memDB) record(session string) (o tenure.Object, ok bool) {
	if session == "" {
		return tenure.Object{}, false
	}
	o, err := d.records.Get(context.Background(), claims.SessionKey(session))
	return o, err == nil
}

func (d *memDB) LongestKey() int { return 0 }

// isOn returns [tenure.ErrMoved] if a statement names another server. The caller holds the mutex.
func (d *memDB) isOn(ctx context.Context) error {
	if name := objects.ServerOf(ctx); name != "" && name != d.server() {
		return tenure.ErrMoved
	}
	return nil
}

// server returns the server, and marks it in a new lineage. The caller holds the mutex.
func (d *memDB) server() string {
	if d.marked.IsZero() {
		d.marked = time.Now()
	}
	on, _ := d.records.Lineage(context.Background())
	return on.Server
}

func (d *memDB) Traits() tenure.Traits { return tenure.Traits{} }

func (d *memDB) Lineage(ctx context.Context) (tenure.Lineage, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server()
	return d.records.Lineage(ctx)
}

func (d *memDB) Look(ctx context.Context, kind string, ids []string, _ time.Duration) (found []objects.Claim, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.isOn(ctx); err != nil {
		return nil, err
	}
	for _, id := range ids {
		if r := d.rows[rowKey{kind, id}]; r != nil {
			_, stands := d.record(r.Session)
			c := r.Claim
			c.Gone = c.Session != "" && !stands
			found = append(found, c)
		}
	}
	return found, nil
}

func (d *memDB) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) (taken []objects.Claim, err error) {
	return d.take(ctx, session, kind, ids, missing, limit, func(r *memRow) bool {
		return r.Session == "" || slices.Contains(gone, r.Session)
	})
}

func (d *memDB) TakeOne(ctx context.Context, session, kind string, ids, gone []string, limit time.Duration) ([]objects.Claim, error) {
	ids = slices.Clone(ids)
	d.locked(func() {
		token := func(id string) (token int64) {
			if r := d.rows[rowKey{kind, id}]; r != nil {
				token = r.Token
			}
			return token
		}
		slices.SortStableFunc(ids, func(a, b string) int { return cmp.Compare(token(a), token(b)) })
	})
	found := false
	return d.take(ctx, session, kind, ids, nil, limit, func(r *memRow) bool {
		one := !found && !r.isLocked() && (r.Session == "" || slices.Contains(gone, r.Session))
		found = found || one
		return one
	})
}

// take takes the rows that are free, and missing ones.
func (d *memDB) take(ctx context.Context, session, kind string, ids, missing []string, limit time.Duration, isFree func(*memRow) bool) (taken []objects.Claim, err error) {
	_, err = d.write(ctx, limit, kind, ids, isFree, func(rows []*memRow) {
		for _, r := range append(rows, d.create(kind, missing)...) {
			before := r.Claim
			r.Session, r.Token = session, max(r.Token+1, d.now().UnixMicro())
			taken = append(taken, r.Claim)
			if isWish(r.Claim) {
				d.watcher.wished(ctx, r.Claim)
			} else {
				d.watcher.rowTaken(ctx, before, r.Claim)
			}
		}
	})
	return taken, err
}

// create creates those of the rows that are missing, and returns them. The caller holds the mutex.
func (d *memDB) create(kind string, ids []string) (rows []*memRow) {
	for _, id := range ids {
		if d.rows[rowKey{kind, id}] == nil {
			r := &memRow{Claim: objects.Claim{Kind: kind, ID: id}}
			d.rows[rowKey{kind, id}] = r
			rows = append(rows, r)
		}
	}
	return rows
}

func (d *memDB) Move(ctx context.Context, session, kind string, seen []objects.Claim, limit time.Duration) (moved, locked []objects.Claim, err error) {
	was := make(map[string]objects.Claim)
	for _, s := range seen {
		was[s.ID] = objects.Claim{Kind: kind, ID: s.ID, Session: s.Session, Token: s.Token}
	}
	isSeen := func(r *memRow) bool { return r.Claim == was[r.ID] }
	locked, err = d.write(ctx, limit, kind, idsOf(seen), isSeen, func(rows []*memRow) {
		for _, r := range rows {
			before := r.Claim
			r.Session, r.Token = session, max(r.Token+1, d.now().UnixMicro())
			d.wanted[before] = true
			moved = append(moved, r.Claim)
			if isWish(r.Claim) {
				d.watcher.offered(ctx, before, r.Claim)
			} else {
				d.watcher.rowMoved(ctx, was[r.ID], before, r.Claim)
			}
		}
	})
	return moved, locked, err
}

func (d *memDB) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, _ objects.Freeing, limit time.Duration) (left []objects.Claim, err error) {
	token := make(map[string]int64)
	for i, id := range ids {
		token[id] = tokens[i]
	}
	isOwned := func(r *memRow) bool { return r.Session == session && r.Token == token[r.ID] }
	return d.write(ctx, limit, kind, ids, isOwned, func(rows []*memRow) {
		for _, r := range rows {
			before := r.Claim
			r.Session = ""
			if !isWish(before) {
				d.watcher.rowFreed(ctx, before)
			}
		}
	})
}

// write locks the rows that are not locked yet, and lets change write them when the statement
// commits. It returns the other rows.
func (d *memDB) write(ctx context.Context, limit time.Duration, kind string, ids []string, which func(*memRow) bool, change func([]*memRow)) (left []objects.Claim, err error) {
	open, over := d.opens(ctx), error(nil)
	if open > limit {
		open, over = limit, errors.New("canceling statement due to statement timeout")
	}
	unlocked := make(chan struct{})
	var rows []*memRow
	var epoch int
	var moved error
	d.locked(func() {
		if moved = d.isOn(ctx); moved != nil {
			return
		}
		epoch = d.epoch
		for _, id := range ids {
			switch r := d.rows[rowKey{kind, id}]; {
			case r == nil || !which(r):
			case r.isLocked():
				left = append(left, r.Claim)
			default:
				r.unlocked = unlocked
				rows = append(rows, r)
			}
		}
	})
	if moved != nil {
		return nil, moved
	}
	if open > 0 {
		time.Sleep(open)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	close(unlocked)
	for _, r := range rows {
		r.unlocked = nil
	}
	if over == nil && epoch != d.epoch {
		over = errRestored
	}
	for _, r := range rows {
		if over == nil && d.refused[r.ID] {
			over = &objects.Refused{Cause: errors.New("a trigger refuses the row")}
		}
	}
	if over != nil {
		return nil, over
	}
	change(rows)
	return left, nil
}

func (d *memDB) Request(_ context.Context, kind string, ids []string, _ time.Duration) (wanted []objects.Claim, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range ids {
		if r := d.rows[rowKey{kind, id}]; r != nil && r.Session != "" {
			d.wanted[r.Claim] = true
			wanted = append(wanted, r.Claim)
		}
	}
	return wanted, nil
}

func (d *memDB) Wanted(_ context.Context, session string, after objects.Claim, n int, _ time.Duration) (wanted []objects.Claim, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for c := range d.wanted {
		if c.Session == session && compareClaims(c, after) > 0 {
			wanted = append(wanted, c)
		}
	}
	slices.SortFunc(wanted, compareClaims)
	wanted = wanted[:min(n, len(wanted))]
	for i, c := range wanted {
		if r := d.rows[rowKey{c.Kind, c.ID}]; r == nil || r.Claim != c {
			wanted[i].Gone = true
			delete(d.wanted, c)
		}
	}
	return wanted, nil
}

func compareClaims(a, b objects.Claim) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Token, b.Token))
}

func (d *memDB) Owned(ctx context.Context, session, afterKind, afterID string, n int, _ time.Duration) (owned []objects.Claim, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.isOn(ctx); err != nil {
		return nil, err
	}
	for _, r := range d.rows {
		if r.Session == session && (r.Kind > afterKind || r.Kind == afterKind && r.ID > afterID) {
			owned = append(owned, r.Claim)
		}
	}
	slices.SortFunc(owned, compareClaims)
	return owned[:min(n, len(owned))], nil
}

func (d *memDB) Sessions(context.Context, time.Duration) ([]objects.Session, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	named := make(map[string]bool)
	for _, r := range d.rows {
		named[r.Session] = true
	}
	return d.sessions(named), nil
}

// sessions returns the sessions that rows name. The caller holds the mutex.
func (d *memDB) sessions(named map[string]bool) (sessions []objects.Session) {
	delete(named, "")
	for _, id := range slices.Sorted(maps.Keys(named)) {
		s := objects.Session{ID: id, Server: int64(1 + d.epoch)}
		for c := range d.wanted {
			s.Wanted = s.Wanted || c.Session == id
		}
		o, ok := d.record(id)
		if s.Gone = !ok; ok {
			s.Record = &objects.Row{
				ID: objects.ID(o.Key), Labels: []byte(objects.EncodeLabels(o.Labels)), Payload: o.Payload, Version: o.Version,
				Created: stamp(o.CreatedAt), Updated: stamp(o.UpdatedAt), Age: objects.Age(stamp(o.UpdatedAt), d.now()),
			}
		}
		sessions = append(sessions, s)
	}
	return sessions
}

func (d *memDB) Prune(_ context.Context, _ int64, n int, _ time.Duration) (last int64, pruned int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for k, r := range d.rows {
		if pruned < n && r.Session == "" && !r.isLocked() && r.Token < d.now().Add(-objects.TombstoneAge).UnixMicro() {
			delete(d.rows, k)
			pruned++
		}
	}
	for c := range d.wanted {
		if r := d.rows[rowKey{c.Kind, c.ID}]; r == nil || r.Claim != c {
			if _, lives := d.record(c.Session); lives {
				continue
			}
			delete(d.wanted, c)
			d.watcher.noticePruned(c)
		}
	}
	return 0, pruned, nil
}

// OfKinds and Forget are for [claims.Session.List] and [claims.Keys.Forget].
func (d *memDB) OfKinds(_ context.Context, kinds []string, _ time.Duration) (listed []objects.Claim, at time.Time, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.rows {
		if _, stands := d.record(r.Session); stands && slices.Contains(kinds, r.Kind) {
			listed = append(listed, r.Claim)
		}
	}
	if len(listed) == 0 {
		return nil, time.Time{}, nil
	}
	return listed, d.now(), nil
}

func (d *memDB) Forget(_ context.Context, kind string, _ time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	maps.DeleteFunc(d.rows, func(k rowKey, r *memRow) bool { return k.kind == kind && r.Session == "" && !r.isLocked() })
	return nil
}

// fenced is a transaction that depends on a claim. It is open for a while after it has locked
// the row.
func (d *memDB) fenced(ctx context.Context, c objects.Claim, open time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.fencedWrite(ctx, c, open)
	d.watcher.fencedWrite(ctx, c, err)
	return err
}

func (d *memDB) fencedWrite(_ context.Context, c objects.Claim, open time.Duration) error {
	if !d.isHere(c.Session) {
		return tenure.ErrMoved
	}
	r := d.rows[rowKey{c.Kind, c.ID}]
	for r != nil && r.unlocked != nil {
		unlocked := r.unlocked
		d.mu.Unlock()
		<-unlocked
		d.mu.Lock()
		r = d.rows[rowKey{c.Kind, c.ID}]
	}
	if r == nil || r.Claim != c {
		return tenure.ErrLost
	}
	if open > 0 {
		epoch := d.epoch
		r.readers++
		d.mu.Unlock()
		time.Sleep(open)
		d.mu.Lock()
		r.readers--
		if epoch != d.epoch {
			return errRestored
		}
	}
	return nil
}

// isHere reports whether a session was renewed on the present server, as far as its record says. The caller holds the mutex.
func (d *memDB) isHere(session string) bool {
	var label struct {
		Server string `json:"server"`
	}
	o, _ := d.record(session)
	_ = json.Unmarshal([]byte(o.Labels["tenure.lineage"]), &label)
	return label.Server == "" || label.Server == d.server()
}

type noWatcher struct{}

func (noWatcher) recordPut(context.Context, tenure.Object)               {}
func (noWatcher) recordDeleted(context.Context, string)                  {}
func (noWatcher) rowTaken(context.Context, objects.Claim, objects.Claim) {}
func (noWatcher) rowFreed(context.Context, objects.Claim)                {}
func (noWatcher) rowMoved(context.Context, objects.Claim, objects.Claim, objects.Claim) {
}
func (noWatcher) noticePruned(objects.Claim)                            {}
func (noWatcher) fencedWrite(context.Context, objects.Claim, error)     {}
func (noWatcher) wished(context.Context, objects.Claim)                 {}
func (noWatcher) offered(context.Context, objects.Claim, objects.Claim) {}
