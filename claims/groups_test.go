package claims_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// slowTable has time for so many keys in a statement.
type slowTable struct {
	objects.ClaimsTable
	most    atomic.Int64
	largest atomic.Int64 // statement that it has finished
	tooSlow atomic.Int64
	mute    bool // a free that takes too long is not answered
}

func (t *slowTable) has(n int) error {
	if int64(n) > t.most.Load() {
		t.tooSlow.Add(1)
		return &objects.TooSlow{Cause: errors.New("canceling statement due to statement timeout")}
	}
	t.largest.Store(max(t.largest.Load(), int64(n)))
	return nil
}

func (t *slowTable) Look(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	if err := t.has(len(ids)); err != nil {
		return nil, err
	}
	return t.ClaimsTable.Look(ctx, kind, ids, limit)
}

func (t *slowTable) Take(ctx context.Context, session, kind string, ids, gone, missing []string, limit time.Duration) ([]objects.Claim, error) {
	if err := t.has(len(ids) + len(missing)); err != nil {
		return nil, err
	}
	return t.ClaimsTable.Take(ctx, session, kind, ids, gone, missing, limit)
}

func (t *slowTable) Free(ctx context.Context, session, kind string, ids []string, tokens []int64, how objects.Freeing, limit time.Duration) ([]objects.Claim, error) {
	if t.mute && int64(len(ids)) > t.most.Load() {
		time.Sleep(limit)
		return nil, context.DeadlineExceeded
	}
	if err := t.has(len(ids)); err != nil {
		return nil, err
	}
	return t.ClaimsTable.Free(ctx, session, kind, ids, tokens, how, limit)
}

func (t *slowTable) Owned(ctx context.Context, session, afterKind, afterID string, n int, limit time.Duration) ([]objects.Claim, error) {
	if err := t.has(n); err != nil {
		return nil, err
	}
	return t.ClaimsTable.Owned(ctx, session, afterKind, afterID, n, limit)
}

func (t *slowTable) Request(ctx context.Context, kind string, ids []string, limit time.Duration) ([]objects.Claim, error) {
	if err := t.has(len(ids)); err != nil {
		return nil, err
	}
	return t.ClaimsTable.Request(ctx, kind, ids, limit)
}

func (t *slowTable) Wanted(ctx context.Context, session string, after objects.Claim, n int, limit time.Duration) ([]objects.Claim, error) {
	if err := t.has(n); err != nil {
		return nil, err
	}
	return t.ClaimsTable.Wanted(ctx, session, after, n, limit)
}

func (t *slowTable) Prune(ctx context.Context, after int64, n int, limit time.Duration) (int64, int, error) {
	if err := t.has(n); err != nil {
		return 0, 0, err
	}
	return t.ClaimsTable.Prune(ctx, after, n, limit)
}

func TestStatementsAreSmallerWhereTheDatabaseIsSlow(t *testing.T) {
	for _, most := range []int64{1, 7, 300} {
		inBubble(t, func(w *world) {
			slow := &slowTable{ClaimsTable: w.table}
			slow.most.Store(most)
			w.table = slow
			a, b := w.start("a"), w.start("b")
			n := int(3 * most)
			got := a.claim(names(n)...)
			require.Len(w, got, n)
			require.NoError(w, a.keys.Release(w.Context(), got[:n/3]...))
			require.Len(w, b.claim(names(n)...), n/3)
			require.NoError(w, b.keys.RequestRelease(w.Context(), names(n)...))
			var asked atomic.Int64
			c := w.startWith("c", claims.SessionConfig{ReleaseRequested: func(claims.Claim) { asked.Add(1) }})
			more := c.claim(names(2 * n)[n:]...)
			require.NoError(w, a.keys.RequestRelease(w.Context(), names(2 * n)[n:]...))
			time.Sleep(ttl)
			require.EqualValues(w, len(more), asked.Load())
			a.crash() // the rest is freed by others
			time.Sleep(2 * ttl)
			require.Len(w, b.claim(names(n)...), n-n/3)
			require.LessOrEqual(w, slow.largest.Load(), most)
			b.stop()
			c.stop()
			if most != 7 { // a day is enough
				return
			}
			time.Sleep(25 * time.Hour)
			d := w.start("d")
			time.Sleep(3 * time.Hour)
			looked, err := w.table.Look(w.Context(), "tenant", names(1), ttl)
			require.NoError(w, err)
			require.Empty(w, looked, "no row is deleted")
			require.Zero(w, d.session.Status().SweepErrors)
		})
	}
}

func TestKeysAreFreedInSmallerStatementsWhereNoAnswerComesInTime(t *testing.T) {
	inBubble(t, func(w *world) {
		slow := &slowTable{ClaimsTable: w.table, mute: true}
		slow.most.Store(1000)
		w.table = slow
		a := w.start("a")
		got := a.claim(names(1000)...)
		require.Len(w, got, 1000)
		slow.most.Store(100)
		ctx, cancel := context.WithTimeout(w.Context(), 20*ttl)
		defer cancel()
		require.NoError(w, a.keys.Release(ctx, got...))
		slow.most.Store(1000)
	})
}

func TestStatementsAreSlowlyLargerWhenTheDatabaseIsFastAgain(t *testing.T) {
	inBubble(t, func(w *world) {
		slow := &slowTable{ClaimsTable: w.table}
		slow.most.Store(100)
		w.table = slow
		a := w.start("a")
		turn := func() {
			got := a.claim(names(1000)...)
			require.Len(w, got, 1000)
			require.NoError(w, a.keys.Release(w.Context(), got...))
		}
		turn()
		failed := slow.tooSlow.Load()
		turn()
		require.Less(w, slow.tooSlow.Load()-failed, int64(15), "it tries larger ones all the time")
		slow.most.Store(1000)
		turn()
		require.Less(w, slow.largest.Load(), int64(900), "it believes that all is well at once")
		for range 20 {
			turn()
		}
		require.EqualValues(w, 1000, slow.largest.Load())
	})
}

// claimAll claims keys, and more than once only if an answer was late.
func (p *process) claimAll(ids []string) (got []claims.Claim) {
	p.w.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	defer cancel()
	for len(got) < len(ids) {
		some, err := p.keys.TryClaim(ctx, ids...)
		got = append(got, some...)
		if err != nil && (!errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil) {
			p.w.Fatal(len(got), "claims:", err)
		}
	}
	return got
}

// slowly makes the server take three milliseconds for each row.
const slowly = `CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.003); RETURN NEW; END $$;
	CREATE TRIGGER slowly BEFORE INSERT OR UPDATE ON %s FOR EACH ROW EXECUTE FUNCTION slowly()`

func TestManyKeysAreClaimedAtAShortTTLThoughTheServerIsSlow(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	url := testkit.PostgresURL(t)
	w := newWorld(t, testkit.OpenPostgres(t, url, tenure.PostgresConfig{}))
	db := testkit.OpenSQL(t, "pgx", url)
	testkit.ExecSQL(t, db, fmt.Sprintf(slowly, "objects_claims"))
	cfg := claims.SessionConfig{TTL: 6 * time.Second} // so a statement has a second
	a := w.startWith("a", cfg)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	require.NoError(t, a.keys.Release(ctx, a.claimAll(names(1000))...))
	got := a.claimAll(names(1000))
	require.True(t, a.keys.Holds(got[0]))

	w.startWith("b", cfg)
	a.crash()
	testkit.Await(t, "the rows of a removed session are free", func() bool {
		var owned int
		require.NoError(t, db.QueryRow(`SELECT count(*) FROM objects_claims WHERE session IS NOT NULL`).Scan(&owned))
		return owned == 0
	})
}

func TestManyRowsAreTakenAndFinishedAtAShortTTLThoughTheServerIsSlow(t *testing.T) {
	testkit.Slow(t)
	t.Parallel()
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0)`)
	db.exec(testkit.Must(tasks.PostgresDDL()))
	db.add(1, 600)
	db.exec(fmt.Sprintf(slowly, "tasks"))
	a := db.worker(claims.SessionConfig{TTL: 6 * time.Second}, tasks)
	var got []claims.Claim
	for len(got) < 600 {
		got = append(got, a.take(600-len(got))...)
	}
	var all sync.WaitGroup
	for _, c := range got {
		all.Go(func() {
			if err := a.rows.Finish(t.Context(), c); err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v", c, err)
			}
		})
	}
	all.Wait()
	testkit.Await(t, "all are done", func() bool { return db.count(`SELECT count(*) FROM tasks WHERE status = 'done'`) == 600 })
}
