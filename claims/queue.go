package claims

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/report"
)

// Queue is a table of the application whose rows sessions claim: runs, tasks, an outbox. A row holds its own
// claim: the session that owns it, and a fencing token. A claim costs nothing while it is held. A [Worker]
// takes rows for this process's session. A Queue itself needs only the database. It finishes and releases
// the claims that it is given, whichever session owns them.
//
// If a trigger or a constraint does not let a row be claimed or freed, the queue logs this, and retries the row
// less and less often. If several rows are tried and all refused, the table may be refusing the session itself,
// and the error says so.
//
// In the [Claim] of a row, Key.Type is the name of the table, and Key.ID is the row's ID as text.
//
// All methods are safe for concurrent use.
type Queue struct {
	store tenure.Store
	cfg   QueueConfig
	table objects.RowsTable
	rows  *ownerTable // the same as table
	taker *taker      // for sessions of remote workers

	settling *settling // for these sessions
	renewals *objects.Renewals

	retries    logtext.Retries
	registered atomic.Bool // whether this process need not register it any more
	tried      atomic.Bool // whether TryTakeFor has tried to register it

	mu       sync.Mutex // guards the fields below; never held across I/O, nor together with a session's mu
	workers  []*Worker
	lookouts []*lookout
	tellings []telling
	ends     []*finishing // the calls that wait for endTogether
	busy     bool         // whether endTogether runs

	noneExpired  time.Time // when a look has found no row whose claim has expired
	freedExpired time.Time // when freeing such rows was last tried
}

// queueLimit is the time limit of a queue's statements, unless a session of this process has another. It is
// that of a session with the default TTL.
const queueLimit = 5 * time.Second

// NewQueue returns a queue in a [*tenure.PostgresStore] or [*tenure.SQLiteStore]. Queues of one store on tables
// of the same name must have the same Schema and columns. NewQueue does no I/O. A [tenure.ErrInvalid] names
// everything that is wrong with the config. For any other store, the error is [errors.ErrUnsupported].
func NewQueue(store tenure.Store, cfg QueueConfig) (*Queue, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if err != nil {
		return nil, opError("new queue", err)
	}
	backend, err := backendOf(store)
	if err != nil {
		return nil, opError("new queue", err)
	}
	q := &Queue{retries: logtext.Retries{Repeat: true}, store: store, cfg: cfg, table: backend.Rows(cfg.statements(), cfg.Logger)}
	q.rows = &ownerTable{q.table, new(groups), queueLimit, cfg.Requested != "", cfg.Table}
	q.taker = newTaker(q, queueLimit, tenure.DefaultTTL)
	q.settling = &settling{store: store, ttl: tenure.DefaultTTL, limit: queueLimit, logger: cfg.Logger}
	q.renewals = backend.Renewals()
	return q, nil
}

// register makes the table known to operators' tools. It logs a failure, and reports success.
func (q *Queue) register(ctx context.Context) bool {
	err := q.writeRecord(ctx)
	if err != nil && ctx.Err() == nil {
		q.cfg.Logger.Warn("failed to register the queue; operators' tools don't show its rows", "table", q.cfg.Table, "error", err)
	}
	return err == nil
}

// writeRecord writes an object that says where to find the claims on the table's rows, unless the object
// exists.
func (q *Queue) writeRecord(ctx context.Context) error {
	cfg := q.cfg
	payload, err := json.Marshal(objects.QueueRecord{Schema: cfg.Schema, Table: cfg.Table, ID: cfg.ID, Session: cfg.Session, Token: cfg.Token})
	if err != nil {
		return err
	}
	key := tenure.Key{Type: objects.QueueType, ID: cfg.Table}
	if cfg.Schema != "" {
		key.ID = cfg.Schema + "." + cfg.Table
	}
	now, err := q.store.Get(ctx, key)
	cond := tenure.IfVersion(now.Version)
	switch {
	case errors.Is(err, tenure.ErrNotFound):
		cond = tenure.IfAbsent()
	case err != nil:
		return err
	case bytes.Equal(now.Payload, payload):
		return nil
	}
	_, err = q.store.PutIf(ctx, tenure.Object{Key: key, Payload: payload}, cond)
	if errors.Is(err, tenure.ErrExists) || errors.Is(err, tenure.ErrConflict) { // another process was faster
		return nil
	}
	return err
}

// Config returns the queue's config, with its defaults.
func (q *Queue) Config() QueueConfig {
	cfg := q.cfg
	cfg.Logger = report.Original(cfg.Logger)
	return cfg
}

// addWorker adds a worker. The queue tells it which claims have ended.
func (q *Queue) addWorker(w *Worker) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.workers = append(q.workers, w)
}

// limit returns the time limit of a statement that ends claims: that of the workers' sessions. A session with a
// long TTL gives an expensive [QueueConfig.Done] the time that it needs.
func (q *Queue) limit() (limit time.Duration) {
	for _, w := range q.allWorkers() {
		limit = max(limit, w.s.limit)
	}
	return cmp.Or(limit, queueLimit)
}

// allWorkers returns the workers whose sessions have not closed, and forgets the others.
func (q *Queue) allWorkers() []*Worker {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.workers = slices.DeleteFunc(q.workers, func(w *Worker) bool { return w.s.returned.Load() })
	return slices.Clone(q.workers)
}

// ended tells the workers that claims have ended. If they were lost, lost says why; otherwise it is nil.
func (q *Queue) ended(lost error, claims ...Claim) {
	for _, w := range q.allWorkers() {
		w.kind.ended(lost, claims...)
	}
}

// madeRoom wakes the callers that wait for rows with the keys of claims that have ended.
func (q *Queue) madeRoom() {
	if q.cfg.PerKey.Limit > 0 {
		q.Wake()
	}
}

func (q *Queue) opError(what string, err error) error {
	return opError(what+" rows of "+q.cfg.Table, err)
}

// OwnedBy returns all claims that the session with that ID has on rows of the table, except on those that are canceled.
func (q *Queue) OwnedBy(ctx context.Context, session string) ([]Claim, error) {
	rows, err := q.ownedBy(ctx, session)
	if err != nil {
		return nil, q.opError("list", err)
	}
	return q.claimsOf(rows), nil
}

func (q *Queue) ownedBy(ctx context.Context, session string) (owned []objects.Claim, err error) {
	for after, more := "", true; more; {
		var rows []objects.Claim
		if rows, more, err = q.rows.owned(ctx, q.cfg.Table, session, after); err != nil {
			return nil, err
		}
		if owned = append(owned, rows...); len(rows) > 0 {
			after = rows[len(rows)-1].ID
		}
	}
	canceled, err := q.canceledOf(ctx, session)
	return slices.DeleteFunc(owned, func(r objects.Claim) bool {
		return slices.ContainsFunc(canceled, func(c objects.Claim) bool { return c.ID == r.ID && c.Token == r.Token })
	}), err
}

// List returns the claims on up to n rows of the table, in the order of their IDs, beginning after the given
// ID; if that is empty, with the first row. Each claim names the session that owns the row. List is for
// operators: it reads all owned rows.
func (q *Queue) List(ctx context.Context, after string, n int) ([]Claim, error) {
	err := objects.ValidText("after", after)
	if n < 1 {
		err = fmt.Errorf("%w: %d rows are asked for", tenure.ErrInvalid, n)
	}
	if err != nil {
		return nil, q.opError("list", err)
	}
	rows, err := q.table.List(ctx, after, n, q.rows.limit)
	return q.claimsOf(rows), q.opError("list", err)
}

// Owner returns the holder of the session that owns a row, as [Keys.Owner] does.
func (q *Queue) Owner(ctx context.Context, id string) (tenure.Holding, error) {
	holding, err := q.rows.owner(ctx, q.store, q.cfg.Logger, q.cfg.Table, id)
	return holding, opError("owner of "+q.cfg.Table+"/"+id, err)
}

// keepsRequests returns the error of a method that needs a column for requests, if there is none.
func (q *Queue) keepsRequests(method string) error {
	if q.cfg.Requested == "" {
		return fmt.Errorf("%w: %s needs a column that keeps requests: set Requested", tenure.ErrInvalid, method)
	}
	return nil
}

// RequestRelease asks the owners of rows to release them, as [Keys.RequestRelease] does. It needs
// [QueueConfig.Requested]; without it, the error is [tenure.ErrInvalid]. Only sessions that a process runs with
// [Session.Run] are asked. A transaction that has locked one of the rows, as a fenced write under its claim
// does at its end, delays the request. Because the request changes the row, it may end a fenced transaction
// above READ COMMITTED with a serialization failure; retry that transaction.
func (q *Queue) RequestRelease(ctx context.Context, ids ...string) error {
	err := cmp.Or(q.keepsRequests("RequestRelease"), q.rows.validKeys(q.cfg.Table, ids))
	if err == nil {
		err = q.rows.request(ctx, q.store, q.cfg.Table, ids)
	}
	return q.opError("request release of", err)
}

func (q *Queue) claimsOf(rows []objects.Claim) []Claim {
	claims := make([]Claim, 0, len(rows))
	for _, row := range rows {
		claims = append(claims, claimOf(q.cfg.Table, row.Session, row, true))
	}
	return claims
}

// Release gives back the rows of claims, whichever session owns them: any session may take them at once, and their
// attempts are taken back. If a func of [Worker.Do] runs for a row, it is not told. [Worker.Release] tells it, and
// waits until it has returned.
//
// If one of the claims has ended, it returns an [*EndedError] and none is released.
func (q *Queue) Release(ctx context.Context, claims ...Claim) error {
	err := q.valid(claims)
	if err == nil {
		if err = q.end(ctx, objects.Ending{Unused: true}, claims); err == nil {
			q.Wake()
		}
	}
	return q.opError("release", err)
}

// ReleaseAfter gives back the rows of claims, whichever session owns them. No session takes them before
// d has passed by the database's clock. It needs [QueueConfig.NotBefore]; without it, the error is
// [tenure.ErrInvalid]. A func of [Worker.Do] that releases its own row must return soon afterwards.
//
// If one of the claims has ended, it returns an [*EndedError] and none is released.
func (q *Queue) ReleaseAfter(ctx context.Context, d time.Duration, claims ...Claim) error {
	err := q.valid(claims)
	switch {
	case q.cfg.NotBefore == "":
		err = fmt.Errorf("%w: ReleaseAfter needs a column that keeps the time: set NotBefore", tenure.ErrInvalid)
	case d < 0:
		err = fmt.Errorf("%w: %v is negative", tenure.ErrInvalid, d)
	}
	if err == nil {
		err = q.end(ctx, objects.Ending{After: max(d, time.Microsecond)}, claims)
	}
	return q.opError("release", err)
}

// Extend makes claims expire d from now by the database's clock, whichever session owns them; a claim that expires later
// stays as it is. It needs [QueueConfig.Expires]; without it, the error is [tenure.ErrInvalid]. It is for claims of [Queue.TryTakeFor] and
// claims that were detached.
//
// If one of the claims has ended, even if only because it expired and its row was freed, Extend returns an
// [*EndedError], and none is extended.
func (q *Queue) Extend(ctx context.Context, d time.Duration, claims ...Claim) error {
	err := cmp.Or(q.valid(claims), objects.ValidDuration("d", d, "time.Second"))
	switch {
	case q.cfg.Expires == "":
		err = fmt.Errorf("%w: Extend needs a column that keeps the time: set Expires", tenure.ErrInvalid)
	case d <= 0:
		err = fmt.Errorf("%w: %v is not positive", tenure.ErrInvalid, d)
	case slices.ContainsFunc(q.allWorkers(), func(w *Worker) bool { return slices.ContainsFunc(claims, w.Holds) }):
		err = fmt.Errorf("%w: a worker of this process holds one of the claims, which does not expire", tenure.ErrInvalid)
	}
	if err == nil {
		var lost []objects.Claim
		if lost, err = q.endAll(ctx, objects.Ending{Extend: true, After: d}, rowsOf(claims)); err == nil {
			err = q.endedError(claims, lost)
		}
	}
	return q.opError("extend", err)
}

// freeExpiredUntil frees rows whose claims have expired, until a term ends.
func (q *Queue) freeExpiredUntil(t *term) {
	for {
		select {
		case <-t.ended:
			return
		case <-time.After(q.cfg.PollInterval):
			q.freeExpired(t.ctx, false)
		}
	}
}

// freeExpired frees rows whose claims have expired, and returns how many: at most once per PollInterval, and, unless a look
// has just seen some, only if no look has found none within that time.
func (q *Queue) freeExpired(ctx context.Context, seen bool) (freed int) {
	q.mu.Lock()
	last := q.freedExpired
	if !seen && q.noneExpired.After(last) {
		last = q.noneExpired
	}
	due := q.cfg.Expires != "" && time.Since(last) >= q.cfg.PollInterval
	if due {
		q.freedExpired = time.Now()
	}
	q.mu.Unlock()
	if !due {
		return 0
	}
	var ids []string
	limit := q.limit()
	_, err := q.rows.groups.page(ctx, perStatement, func(n int) (err error) {
		ids, err = q.table.Expired(ctx, n, limit)
		return err
	})
	var refused error
	if err == nil {
		err = inGroups(q.rows.groups, ids, func(ids []string) error {
			n, err := q.table.FreeExpired(ctx, ids, limit)
			freed += n
			return err
		}, func(_ string, why error) { refused = why })
	}
	if freed > 0 {
		q.cfg.Logger.Info("freed rows whose claims have expired", "table", q.cfg.Table, "rows", freed)
		q.Wake()
	}
	if err = cmp.Or(err, refused); err != nil && ctx.Err() == nil {
		q.retries.Log(q.cfg.Logger, slog.LevelWarn, "failed to free rows whose claims have expired; retrying", err, "table", q.cfg.Table)
	}
	return freed
}

// Wake wakes the callers that wait for rows, in other processes too. Call it once after adding rows, however
// many. It reports no errors, because a hint may be lost in any case.
func (q *Queue) Wake() { wake(q.store, keyOf(q.cfg.Table), q.rows.limit) }

// valid rejects claims that can't be claims on rows of this table.
func (q *Queue) valid(claims []Claim) error {
	errs := []error{validClaims(claims)}
	for _, c := range claims {
		if c.Key.Type != q.cfg.Table {
			errs = append(errs, fmt.Errorf("%w: %s is not of table %q", tenure.ErrInvalid, c, q.cfg.Table))
		}
	}
	return errors.Join(errs...)
}
