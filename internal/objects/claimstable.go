package objects

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Backend is what a store's database offers to package claims. A store returns it from a method
// Backend.
type Backend interface {
	// Claims returns the table of claims.
	Claims() ClaimsTable
	// Rows returns a table of the user, of a valid config. It does no I/O.
	Rows(cfg RowsConfig, logger *slog.Logger) RowsTable
	// Renewals returns the sessions in this store that this process renews.
	Renewals() *Renewals
}

// Renewals are sessions that a process renews. A process that writes under a claim has its session renewed at once, if
// the database is on another server than at the last renewal. The zero value is ready to use.
type Renewals struct {
	mu    sync.Mutex
	renew map[string]func(context.Context) (renewed bool, err error) // by the session's ID
}

// Add adds a session until remove is called.
func (r *Renewals) Add(session string, renew func(context.Context) (renewed bool, err error)) (remove func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.renew == nil {
		r.renew = make(map[string]func(context.Context) (bool, error))
	}
	r.renew[session] = renew
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.renew, session)
	}
}

// Renew renews a session. It reports false if this process does not renew the session, or the session has ended.
func (r *Renewals) Renew(ctx context.Context, session string) (renewed bool, err error) {
	r.mu.Lock()
	renew := r.renew[session]
	r.mu.Unlock()
	if renew == nil {
		return false, nil
	}
	return renew(ctx)
}

// ClaimStore is a table that records owners: the claims' table of either database, or one of the
// user's. All methods are safe for concurrent use. Each statement has a time limit, so that even
// one whose answer was lost has ended by then.
type ClaimStore interface {
	// Look returns those of the rows that exist.
	Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]Claim, error)

	// Free frees the rows that a session owns under these tokens, and returns those that it could not
	// free because another transaction has locked them. In the claims' table, all are freed alike.
	Free(ctx context.Context, session, kind string, ids []string, tokens []int64, how Freeing, limit time.Duration) (locked []Claim, err error)

	// Owned returns at most n rows that a session owns, beginning after the given row.
	Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]Claim, error)

	// Request asks the owners of rows to give them back, and returns these rows. Request and Wanted are
	// for a table that keeps requests.
	Request(ctx context.Context, kind string, ids []string, limit time.Duration) ([]Claim, error)

	// Wanted returns at most n requested claims of a session, beginning after the given one. Gone
	// means that the claim has ended and that the request was deleted.
	Wanted(ctx context.Context, session string, after Claim, n int, limit time.Duration) ([]Claim, error)

	// Counts returns how many rows name each session, by kind, counting up to most for each. It
	// returns sessions in order, and the kinds of each session in order.
	Counts(ctx context.Context, most int, limit time.Duration) ([]ClaimCount, error)

	// LongestKey returns how many bytes a key may have together with its kind; 0: any number.
	LongestKey() int

	// Sessions returns the sessions that rows name.
	Sessions(ctx context.Context, limit time.Duration) ([]Session, error)
}

// ClaimsTable is the table of claims of either database.
type ClaimsTable interface {
	ClaimStore

	// Migrate creates the tables of claims and requests if they are missing, when the database is up. It
	// returns an [ErrSetup] if they are unsuitable for claims.
	Migrate(ctx context.Context) error

	// Take makes a session the owner of the rows among ids that are free or whose session is in gone, and
	// of the missing rows, which it creates. It leaves rows that another transaction has locked, and
	// returns those that the session owns now and did not own before.
	Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) ([]Claim, error)

	// TakeOne is Take for one of the rows among ids that may be taken: the one that was taken longest ago.
	TakeOne(ctx context.Context, session, kind string, ids, gone []string, limit time.Duration) ([]Claim, error)

	// Move makes a session the owner of other sessions' rows, if the claims on them are those that were
	// seen, and tells their owners as Request does. It leaves rows that another transaction has locked,
	// and returns them as they were seen.
	Move(ctx context.Context, session, kind string, seen []Claim, limit time.Duration) (moved, locked []Claim, err error)

	// OfKinds returns the rows of some kinds whose sessions have records, and the time by the store's
	// clock, which is zero if there are no such rows.
	OfKinds(ctx context.Context, kinds []string, limit time.Duration) ([]Claim, time.Time, error)

	// Forget deletes free rows of a kind.
	Forget(ctx context.Context, kind string, limit time.Duration) error

	// Prune deletes at most n rows that are free and whose last claim is more than a day old, and as many
	// requests for claims that have ended. It returns the number of deleted rows, and the token after
	// which the next call should begin.
	Prune(ctx context.Context, after int64, n int, limit time.Duration) (last int64, pruned int, err error)
}
