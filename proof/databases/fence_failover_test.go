package databases_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/internal/testkit/rig"
)

// fencer is a process with a term, a claim of a key, and claims of rows, under which it writes.
type fencer struct {
	*claimant
	proxy *rig.Proxy
	db    *sql.DB
	name  string // of its role and round
	lease *tenure.Lease
	term  *tenure.Term
	key   claims.Claim
	rows  []claims.Claim // the first for fences, and each of the others to be finished in its own way

	made []statement // before the failover
}

// statement is one with which a transaction of the user's ends.
type statement struct {
	what  string
	query string
	args  []any
}

// fencedRows is how many rows a fencer claims.
const fencedRows = 7

func startFencer(t *testing.T, server *testkit.PostgresServer, role, name, holder string, ttl time.Duration) *fencer {
	f := &fencer{name: name}
	f.proxy = testkit.Must(rig.NewProxy(addressOf(t, server), nil))
	t.Cleanup(f.proxy.Close)
	u := testkit.Must(url.Parse(server.URL()))
	u.Host, u.User = f.proxy.Addr(), url.User(role)
	f.db = testkit.OpenSQL(t, "pgx", u.String())
	f.claimant = startClaimantOn(t, testkit.OpenPostgres(t, u.String(), tenure.PostgresConfig{Logger: testkit.Quiet}), ttl)
	f.lease = testkit.NewLease(t, f.store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: name}, Holder: holder, TTL: ttl})
	return f
}

func (f *fencer) ids(first int) (ids []string) {
	for i := range fencedRows {
		ids = append(ids, fmt.Sprint(first+i))
	}
	return ids
}

// begin takes everything over from a holder that is gone, or finds it free.
func (f *fencer) begin(t *testing.T, first int) {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	testkit.Await(t, "the term begins", func() (ok bool) {
		term, err := f.lease.AcquireOrSteal(ctx)
		f.term, ok = term, err == nil
		return ok
	})
	f.key = testkit.Must(f.keys.Claim(ctx, f.name))[0]
	f.rows = nil
	for len(f.rows) < fencedRows {
		more, err := f.worker.Claim(ctx, f.ids(first)...)
		require.NoError(t, err)
		f.rows = append(f.rows, more...)
	}
	slices.SortFunc(f.rows, func(a, b claims.Claim) int { return strings.Compare(a.Key.ID, b.Key.ID) })
	f.made = f.make(t)
}

// make makes the statements. Those for rows that they finish are for the last two: the first of these is for statements
// that are made before the failover.
func (f *fencer) make(t *testing.T) (all []statement) {
	add := func(what, query string, args []any, err error) {
		require.NoError(t, err, what)
		all = append(all, statement{what, query, args})
	}
	for what, guard := range map[string]tenure.Guard{"term": f.term, "key": f.key, "row": f.rows[0]} {
		query, args, err := f.store.FenceStatement(guard)
		add(what, query, args, err)
	}
	row := f.rows[5]
	if f.made != nil {
		row = f.rows[6]
	}
	query, args, err := f.queue.FinishStatement(row)
	add("finish", query, args, err)
	return all
}

// writes returns all ways in which the process can write, by their names.
func (f *fencer) writes(t *testing.T) (names []string, writes map[string]func(context.Context) error) {
	writes = map[string]func(context.Context) error{}
	add := func(name string, write func(context.Context) error) {
		names = append(names, name)
		writes[name] = write
	}
	insert := func(ctx context.Context, tx *sql.Tx, name string) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO effects VALUES ($1)`, name)
		return err
	}
	insertPgx := func(ctx context.Context, tx pgx.Tx, name string) error {
		_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1)`, name)
		return err
	}
	inTx := func(s statement, name string) func(context.Context) error {
		return func(ctx context.Context) error {
			tx, err := f.db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if err := insert(ctx, tx, name); err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, s.query, s.args...); err != nil {
				return tenure.FenceError(err)
			}
			return tx.Commit()
		}
	}
	for what, guard := range map[string]tenure.Guard{"term": f.term, "key": f.key, "row": f.rows[0]} {
		add("Fenced, "+what, func(ctx context.Context) error {
			return f.store.Fenced(ctx, guard, func(tx pgx.Tx) error { return insertPgx(ctx, tx, "Fenced, "+what) })
		})
		add("FencedTx, "+what, func(ctx context.Context) error {
			return tenure.FencedTx(ctx, f.store, guard, f.db, nil, func(tx *sql.Tx) error { return insert(ctx, tx, "FencedTx, "+what) })
		})
		add("Fence, "+what, func(ctx context.Context) error {
			fenced, err := tenure.Fence(f.store, guard)
			if err == nil {
				_, err = fenced.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "effect", ID: f.name + what}}, tenure.Unconditional())
			}
			return err
		})
	}
	for _, s := range f.made {
		add("FenceStatement made before, "+s.what, inTx(s, "made before, "+s.what))
	}
	for _, what := range []string{"term", "key", "row", "finish"} {
		add("FenceStatement made now, "+what, func(ctx context.Context) error {
			for _, s := range f.make(t) {
				if s.what == what {
					return inTx(s, "made now, "+what)(ctx)
				}
			}
			return errors.New("there is none")
		})
	}
	add("FinishPostgres", func(ctx context.Context) error {
		return f.queue.FinishPostgres(ctx, f.rows[1:2], func(tx pgx.Tx) error { return insertPgx(ctx, tx, "FinishPostgres") })
	})
	add("Finish", func(ctx context.Context) error { return f.queue.Finish(ctx, f.rows[3]) })
	add("FinishEach", func(ctx context.Context) error { return f.queue.FinishEach(ctx, f.rows[4]) })
	return names, writes
}

// writeAll writes in all ways, and returns which writes were done and which were refused for now.
func (f *fencer) writeAll(t *testing.T) (done, moved []string) {
	names, writes := f.writes(t)
	for _, name := range names {
		var err error
		testkit.Await(t, name+" is answered", func() bool { // a connection may be broken
			err = writes[name](t.Context())
			return err == nil || errors.Is(err, tenure.ErrLost) || errors.Is(err, tenure.ErrMoved)
		})
		switch {
		case err == nil:
			done = append(done, name)
		case errors.Is(err, tenure.ErrMoved):
			moved = append(moved, name)
		}
	}
	return done, moved
}

// A holder is cut off for longer than its TTL, as one that is paused, and another takes over. A failover loses all that the
// other has done, so that the records and rows are the first one's again. It comes to the new primary, and writes. With
// -failovers 200 it does so after 200 failovers.
func TestNoFencedWriteIsLateOverAFailoverThatLosesTheNextTerm(t *testing.T) {
	const ttl = 1500 * time.Millisecond // of the holder that is cut off
	primary := testkit.StartPostgres(t, "wal_log_hints=on")
	admin := queueTasks(t, primary.URL(), 0)
	testkit.ExecPostgres(t, admin, `CREATE TABLE effects (name text)`)
	testkit.ExecPostgres(t, admin, `CREATE ROLE worker LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO worker; REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC`)
	for _, setting := range []string{"wal_log_hints = on", "wal_keep_size = '512MB'"} { // for pg_rewind
		testkit.ExecPostgres(t, admin, `ALTER SYSTEM SET `+setting)
	}
	admin.Close()
	standby, _ := standbyOf(t, primary)
	written, late, refused := 0, 0, 0
	for round := range *failovers {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			admin := testkit.PostgresPool(t, primary.URL())
			testkit.ExecPostgres(t, admin, `INSERT INTO tasks SELECT generate_series($1::int, $1 + 99)`, 100*round)
			testkit.ExecPostgres(t, admin, `UPDATE objects SET updated_at_ms = 0 WHERE id = 'tenure.lineage'`) // the last failover was long ago
			formers, nexts := map[string]*fencer{}, map[string]*fencer{}
			for i, role := range []string{"postgres", "worker"} {
				name := fmt.Sprint(role, "-", round)
				formers[role] = startFencer(t, primary, role, name, "former", ttl)
				formers[role].begin(t, 100*round+20*i+10)
			}
			f := &failover{T: t, primary: primary, standby: standby}
			f.awaitStandby()
			f.lag()
			for i, role := range []string{"postgres", "worker"} {
				formers[role].proxy.Set(rig.Weather{Refuse: true})
				nexts[role] = startFencer(t, primary, role, formers[role].name, "next", 2*testkit.Patience)
				nexts[role].begin(t, 100*round+20*i+10)
				require.Greater(t, nexts[role].term.Token(), formers[role].term.Token())
				require.Greater(t, nexts[role].key.Token, formers[role].key.Token)
			}
			require.NoError(t, primary.Stop("immediate"))
			require.NoError(t, standby.Promote())
			comesLater := round%3 > 0 // the next holder, so that its term is not written again meanwhile
			for role, next := range nexts {
				if comesLater {
					next.proxy.Set(rig.Weather{Refuse: true})
				}
				next.proxy.Redirect(addressOf(t, standby))
				former := formers[role]
				former.proxy.Redirect(addressOf(t, standby))
				former.proxy.Set(rig.Weather{})
				done, moved := former.writeAll(t)
				late, refused = late+len(done), refused+len(moved)
				if len(done) > 0 {
					t.Errorf("%s: late: %v", former.name, done)
				}
			}
			for _, next := range nexts {
				if t.Failed() {
					break // its rows may be finished
				}
				next.proxy.Set(rig.Weather{})
				testkit.Await(t, "renewed", func() bool { return next.lease.Renew(t.Context(), next.term) == nil })
				testkit.Await(t, "its claims have ended", func() bool { return !next.keys.Holds(next.key) && testkit.Held(next.session) == 0 })
				names, writes := next.writes(t)
				for _, name := range names {
					var err error
					if name == "FenceStatement made before, term" { // it names the former server
						testkit.Await(t, name, func() bool { err = writes[name](t.Context()); return errors.Is(err, tenure.ErrMoved) })
						continue
					}
					testkit.Await(t, name, func() bool { err = writes[name](t.Context()); return err == nil || errors.Is(err, tenure.ErrLost) })
					if strings.HasSuffix(name, ", term") {
						require.NoError(t, err, name)
						written++
					} else {
						require.ErrorIs(t, err, tenure.ErrLost, name)
					}
				}
			}
			for _, f := range formers {
				f.stop()
			}
			for _, f := range nexts {
				f.stop()
			}
		})
		// What was lost is undone, and the former primary follows the new one.
		require.NoError(t, primary.Rewind(standby))
		require.NoError(t, primary.Follow(standby))
		require.NoError(t, primary.Start())
		primary, standby = standby, primary
	}
	t.Logf("%d failovers: %d late writes, %d refused until the term is renewed, %d by the next holder", *failovers, late, refused, written)
}
