package pgobjects

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/tenurelib/tenure/internal/logtext"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
	"github.com/tenurelib/tenure/internal/pgconns"
)

const (
	// migrateLock is the key of the advisory lock that serializes migrations: of several concurrent
	// CREATE TABLE IF NOT EXISTS, all but one may fail.
	migrateLock = 0x74656e757265 // "tenure"

	// lookAgain is how long the store relies on what it found in the database, unless a failed
	// statement contradicts that.
	lookAgain = 10 * time.Minute

	// lookAtMost is how long a look may take for a new connection, or for a call without a context.
	lookAtMost = 5 * time.Second

	// lookPatience is how long a call waits for another one's look before it looks itself. The other
	// connection may hang.
	lookPatience = 2 * time.Second
)

var errNoTable = errors.New("the table does not exist")

// setup is what was found in the database.
type setup struct {
	at     time.Time // when it was found
	placed names     // of the tables in their schemas
	parts  string    // OIDs of the tables, their partitions and inheriting tables, as an array of Postgres
	print  string    // see fingerprint

	schemas [objects.TableCount]string // in which the tables are, or would be created
	exists  [objects.TableCount]bool
	wrong   [objects.TableCount]string // why promises can't be kept on them

	role  string                     // current_user
	lacks [objects.TableCount]string // privileges on the tables that exist, and without which statements fail

	ahead       string        // schema of another table that search_path finds now
	tombstones  bool          // this role may write them, and the table is as it should be
	unlogged    bool          // a crash empties the table of tombstones
	uniqueNames bool          // a unique index covers the names
	idAlone     bool          // an ID is unique among all types, not only in its own
	idleTimeout time.Duration // idle_in_transaction_session_timeout; 0 means none
}

// equal reports whether both looks found the same.
func (s *setup) equal(other *setup) bool {
	if other == nil {
		return false
	}
	same := *other
	same.at, same.placed, same.parts, same.print = s.at, s.placed, s.parts, s.print
	return same == *s
}

// in returns the statement of a text.
func (s *setup) in(text string) string { return s.placed.in(text) }

// mayDo returns an error if a call needs something that is missing besides the table of objects.
type mayDo func(*setup) error

func mayRead(*setup) error { return nil }

// mayHold returns an error if this role lacks a privilege that a lease needs. Otherwise a
// lease that can be acquired, but not renewed, would be acquired again and again.
func (s *setup) mayHold() error {
	if s.lacks[objects.TableOfObjects] == "" {
		return nil
	}
	return fmt.Errorf("%w: this role lacks privileges that a lease needs (as the owner: %s)", objects.ErrSetup, s.grants())
}

// grants returns the statements that give this role the privileges that it lacks.
func (s *setup) grants() string {
	var grants []string
	for i, lacks := range s.lacks {
		if lacks == "" || slices.Contains(s.lacks[:i], lacks) { // an earlier statement names the table
			continue
		}
		var tables []string
		for j, alike := range s.lacks {
			if alike == lacks {
				tables = append(tables, s.placed.tables[j])
			}
		}
		grants = append(grants, fmt.Sprintf("GRANT %s ON %s TO %s", lacks, strings.Join(tables, ", "), objects.Quoted(s.role)))
	}
	return strings.Join(grants, "; ")
}

// mayNotCreate returns the [objects.ErrSetup] of a role that may not create what is missing. Once the owner has
// created all tables, the role needs privileges on them.
func (s *setup) mayNotCreate(denied error, schema string) error {
	then := *s
	for i := range then.lacks {
		if !s.exists[i] {
			then.lacks[i] = "SELECT, INSERT, UPDATE, DELETE"
		}
	}
	grants := then.grants()
	if schema != "" {
		grants = fmt.Sprintf("GRANT USAGE ON SCHEMA %s TO %s; %s", objects.Quoted(schema), objects.Quoted(s.role), grants)
	}
	return fmt.Errorf("%w: %w (make all tables as the owner, for example with tenure migrate, and then: %s)", objects.ErrSetup, denied, grants)
}

// mayClaim returns an error if no promise about claims can be kept.
func (s *setup) mayClaim() error {
	var wrong []string
	var missing error
	for _, i := range []int{objects.TableOfClaims, objects.TableOfRequests} {
		if s.wrong[i] != "" {
			wrong = append(wrong, s.wrong[i])
		}
		if !s.exists[i] {
			missing = &objects.NoTable{Cause: fmt.Errorf("%s: %w", s.placed.tables[i], errNoTable), OfClaims: true}
		}
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: %s", objects.ErrSetup, strings.Join(wrong, "; "))
	}
	return missing
}

// setups remembers what was found in the database, and looks again when that may have changed.
type setups struct {
	conns  *pgconns.Conns
	cfg    Config
	names  names // as configured
	logger *slog.Logger

	remembered[setup]                       // nothing while the database is unsuitable
	told              atomic.Pointer[setup] // what was last logged; nil before the first look that succeeded
	connecting        gate                  // of new connections that look
}

// remembered is what was last found in the database.
type remembered[T any] struct {
	found   atomic.Pointer[T] // nil before the first look
	looking gate
}

// recall returns what was found, and looks first if nothing was found yet or if it is outdated. One call
// looks. Meanwhile, and if it finds nothing out, the others use what was found before; if that is nothing,
// they wait for it.
func (r *remembered[T]) recall(ctx context.Context, outdated func(*T) bool, look func() (*T, error)) (*T, error) {
	found := r.found.Load()
	if found == nil {
		leave, err := r.looking.enter(ctx)
		if err != nil {
			return nil, err
		}
		defer leave()
		if found = r.found.Load(); found != nil {
			return found, nil
		}
		return look()
	}
	if !outdated(found) || !r.looking.tryEnter() {
		return found, nil
	}
	defer r.looking.leave()
	again, err := look()
	if err != nil && !errors.Is(err, objects.ErrSetup) {
		return found, nil
	}
	return again, err
}

// gate lets one call look while others wait for what it finds. It is of size 1.
type gate chan struct{}

func newGate() gate { return make(gate, 1) }

// enter waits until no other call looks, until the other takes too long, or until ctx ends.
func (g gate) enter(ctx context.Context) (leave func(), err error) {
	patience := time.NewTimer(lookPatience)
	defer patience.Stop()
	select {
	case g <- struct{}{}:
		return g.leave, nil
	case <-patience.C:
		return func() {}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (g gate) tryEnter() bool {
	select {
	case g <- struct{}{}:
		return true
	default:
		return false
	}
}

func (g gate) leave() { <-g }

// migrate creates the tables of objects and tombstones if they are missing, and looks at the result. Only
// the first is required.
func (s *setups) migrate(ctx context.Context) (found *setup, isNew bool, err error) {
	err = s.whenUp(ctx, func() error {
		found, err := s.inspect(ctx, s.query)
		if errors.Is(err, errNoTable) {
			isNew = true
			if err = s.createTable(ctx, found, objects.PostgresObjects); err == nil {
				found, err = s.inspect(ctx, s.query)
			}
		}
		if err != nil || found.exists[objects.TableOfTombstones] {
			return err
		}
		err = s.createTable(ctx, found, objects.PostgresTombstones)
		if pgconns.SQLState(err) == pgconns.StateDenied {
			return nil
		}
		return err
	})
	if err != nil {
		return nil, false, err
	}
	found, err = s.look(ctx)
	return found, isNew, err
}

// migrateClaims creates the tables of claims and requests if they are missing, and looks at the result.
func (s *setups) migrateClaims(ctx context.Context) error {
	err := s.whenUp(ctx, func() error {
		found, err := s.inspect(ctx, s.query)
		if err != nil || found.exists[objects.TableOfClaims] && found.exists[objects.TableOfRequests] {
			return err
		}
		return s.createTable(ctx, found, objects.PostgresClaims)
	})
	if err != nil {
		return err
	}
	found, err := s.look(ctx)
	if err != nil {
		return err
	}
	return found.mayClaim()
}

// createTable creates tables in the schema where they were looked for.
func (s *setups) createTable(ctx context.Context, found *setup, ddl string) error {
	err := pgx.BeginFunc(ctx, s.conns.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, int64(migrateLock)); err != nil {
			return err
		}
		// CREATE SCHEMA IF NOT EXISTS needs the right to create schemas even if this one exists.
		exists := s.cfg.Schema == ""
		if !exists {
			err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1)`, s.cfg.Schema).Scan(&exists)
			if err != nil {
				return err
			}
		}
		if !exists {
			if _, err := tx.Exec(ctx, `CREATE SCHEMA `+objects.Quoted(s.cfg.Schema)); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, found.placed.in(ddl))
		return err
	})
	s.conns.LeaveReadOnly(err)
	switch {
	case pgconns.IsConnecting(err):
	case pgconns.SQLState(err) == pgconns.StateDenied:
		return found.mayNotCreate(err, s.cfg.Schema)
	case pgconns.SQLState(err) == stateNoSchema:
		return fmt.Errorf("%w: %w (search_path names no schema that exists and that role %s may use: set Schema, or GRANT USAGE, CREATE ON a SCHEMA of the path)",
			objects.ErrSetup, err, objects.Quoted(found.role))
	}
	return err
}

// query sends a query on one of the store's own connections, because a session of the application
// may have a different search_path.
func (s *setups) query(ctx context.Context, sql string, args []any, dest ...any) error {
	return s.conns.QueryRow(objects.WithLeaseCall(ctx), sql, args, dest...)
}

// get looks at the database on the first call, and again from time to time, because operators change
// tables and privileges while replicas run.
func (s *setups) get(ctx context.Context) (*setup, error) {
	return s.recall(ctx, func(found *setup) bool { return time.Since(found.at) >= lookAgain }, func() (*setup, error) { return s.look(ctx) })
}

// look looks at the database, and remembers what it finds.
func (s *setups) look(ctx context.Context) (*setup, error) { return s.lookBy(ctx, s.query) }

func (s *setups) lookBy(ctx context.Context, query queryRow) (*setup, error) {
	found, err := s.inspect(ctx, query)
	if err != nil {
		if errors.Is(err, objects.ErrSetup) {
			s.found.Store(nil)
		}
		return nil, err
	}
	s.believe(found)
	return found, nil
}

// connected compares the tables with what was found last, through a new connection of the store before any
// call uses it. If they differ, it looks again, and refuses the connection if they are now unsuitable. The
// previous connection may have ended because the server crashed, which empties an UNLOGGED table, or because
// a backup was restored. The first look opens the first connection itself.
func (s *setups) connected(ctx context.Context, conn *pgx.Conn) error {
	if s.told.Load() == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookAtMost)
	defer cancel()
	query := func(ctx context.Context, sql string, args []any, dest ...any) error {
		return conn.QueryRow(ctx, sql, args...).Scan(dest...)
	}
	found := s.found.Load()
	if same, err := found.isUnchanged(ctx, query); same || err != nil {
		return err
	}
	leave, err := s.connecting.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if again := s.found.Load(); again != found { // another connection has looked
		if same, err := again.isUnchanged(ctx, query); same || err != nil {
			return err
		}
	}
	if _, err = s.lookBy(ctx, query); errors.Is(err, errNoTable) { // the connection may be the one that creates it
		return nil
	}
	return err
}

// believe makes the store rely on what was found. It logs what is wrong with the database, unless it has
// logged the same before.
func (s *setups) believe(found *setup) {
	before := s.told.Swap(found) // first, because the listener needs it as soon as anything is found
	s.found.Store(found)
	if found.equal(before) {
		return
	}
	warn := func(is bool, text string, attrs ...any) {
		if is {
			s.logger.Warn(text, attrs...)
		}
	}
	table, tombstones := s.names.tables[objects.TableOfObjects], s.names.tables[objects.TableOfTombstones]
	warn(!found.tombstones, "no table of tombstones that this role may write: only the database's clock keeps versions from going back",
		"missing", tombstones, "wrong", found.wrong[objects.TableOfTombstones])
	warn(found.unlogged, "the table of tombstones is unlogged: after a crash of the database only its clock keeps versions from going back", "table", tombstones)
	warn(!found.uniqueNames, "no unique index on (object_type, name): two objects can have one name", "table", table)
	warn(found.ahead != "", "search_path now finds another table of that name: this store stays with its own, and replicas that start now use the other one",
		"table", found.placed.tables[objects.TableOfObjects], "other", found.ahead)
}

// call makes a call with statements for the tables that were found, if the tables suit it. If the server
// rejects the call because the database has changed since, call looks again and repeats it: a rejected call
// has changed nothing. If nothing has changed, call also returns what was found.
func (s *setups) call(ctx context.Context, may mayDo, fn func(found *setup) error) (same *setup, err error) {
	found, err := s.which(ctx, may)
	if err != nil {
		return nil, err
	}
	if err = fn(found); !outdated(err) {
		return nil, err
	}
	again, lookErr := s.look(ctx)
	if lookErr == nil {
		lookErr = may(again)
	}
	switch {
	case errors.Is(lookErr, objects.ErrSetup):
		return nil, lookErr // it explains what is wrong with the table, not only with this call
	case lookErr != nil: // no time was left, for example; the next call begins with a look
		s.found.CompareAndSwap(found, nil)
		return nil, err
	case !again.equal(found):
		return nil, fn(again)
	}
	return again, err
}

// which returns what was found, or why it is unsuitable for a call.
func (s *setups) which(ctx context.Context, may mayDo) (*setup, error) {
	found, err := s.get(ctx)
	if err == nil && may(found) != nil {
		found, err = s.look(ctx) // it may have been corrected since
	}
	if err != nil {
		return nil, err
	}
	return found, may(found)
}

// claiming returns what was found, or why claims are not possible.
func (s *setups) claiming(ctx context.Context) (*setup, error) {
	return s.which(ctx, (*setup).mayClaim)
}

// write makes a write as call does, and repeats it without tombstones if it fails with them. Tombstones are
// not required, and something that a look can't evaluate, such as the expression of a policy, may forbid
// them.
func (s *setups) write(ctx context.Context, write func(found *setup) error) error {
	same, err := s.call(ctx, mayRead, write)
	if same == nil || !same.tombstones {
		return err
	}
	without := *same
	without.tombstones, without.unlogged = false, false
	if write(&without) != nil {
		return err
	}
	s.believe(&without)
	return nil
}

// whenUp calls fn, and repeats the call while the database can't be reached. It repeats a call a few times
// if the server ends its statements early: the role may have a short lock_timeout, and another replica may
// be creating the tables.
func (s *setups) whenUp(ctx context.Context, fn func() error) error {
	var last error // error of the last attempt that ctx did not cut off, which explains what is wrong
	const most = 6
	early := 0 // tries that the server has ended early
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := s.explain(fn())
		again := pgconns.IsDown(err)
		if pgconns.IsEndedEarly(err) {
			if early++; early == most {
				return fmt.Errorf("%w (%s)", err, pgconns.EarlyRemedy)
			}
			again = true
		}
		switch {
		case err == nil:
			return nil
		case last != nil && ctx.Err() != nil:
			return fmt.Errorf("%w (%w)", last, context.Cause(ctx))
		case errors.Is(err, objects.ErrSetup) || !again:
			return err
		case last == nil:
			s.logger.Warn("waiting for the database", "error", logtext.OneLine(err))
		}
		last = err
		if !pace.Sleep(ctx, pace.Jitter(pause)) {
			return fmt.Errorf("%w (%w)", err, context.Cause(ctx))
		}
	}
}
