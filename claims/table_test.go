package claims_test

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// tables are those of one database.
type tables struct {
	*testing.T
	store tenure.Store
	objects.ClaimsTable

	setToken func(id string, token int64)
	lock     func(c objects.Claim) (unlock func()) // as a fenced write does; nil: that locks the whole database
}

// TestTablesOfClaims holds the table that the simulation uses to what the real ones do.
func TestTablesOfClaims(t *testing.T) {
	testkit.Slow(t)
	t.Run("memory", func(t *testing.T) {
		d := newMemDB(time.Now)
		testTables(t, &tables{store: d, ClaimsTable: d,
			setToken: func(id string, token int64) {
				d.locked(func() { d.rows[rowKey{"tenant", id}].Token = token })
			},
			lock: func(c objects.Claim) func() {
				var r *memRow
				d.locked(func() { r = d.rows[rowKey{c.Kind, c.ID}]; r.readers++ })
				return func() { d.locked(func() { r.readers-- }) }
			}})
	})
	t.Run("sqlite", func(t *testing.T) {
		store := testkit.OpenSQLite(t, filepath.Join(t.TempDir(), "tenure.db"))
		testkit.MigrateClaims(t, store)
		testTables(t, &tables{store: store, ClaimsTable: store.Backend().Claims(), setToken: func(id string, token int64) {
			testkit.ExecSQL(t, store.DB(), `UPDATE objects_claims SET token = ? WHERE id = ?`, token, id)
		}})
	})
	t.Run("postgres", func(t *testing.T) {
		url := testkit.PostgresURL(t)
		store, pool := testkit.OpenPostgres(t, url, tenure.PostgresConfig{}), testkit.PostgresPool(t, url)
		testkit.MigrateClaims(t, store)
		testTables(t, &tables{store: store, ClaimsTable: store.Backend().Claims(),
			setToken: func(id string, token int64) {
				testkit.ExecPostgres(t, pool, `UPDATE objects_claims SET token = $1 WHERE id = $2`, token, id)
			},
			lock: func(c objects.Claim) func() {
				locked, unlock, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
				go func() {
					defer close(ended)
					_ = pgx.BeginFunc(context.Background(), pool, func(tx pgx.Tx) error {
						testkit.ExecPostgres(t, tx, `SELECT FROM objects_claims WHERE kind = $1 AND id = $2 FOR SHARE`, c.Kind, c.ID)
						close(locked)
						<-unlock
						return nil
					})
				}()
				<-locked
				return func() { close(unlock); <-ended }
			}})
	})
}

func testTables(t *testing.T, d *tables) {
	for name, rule := range map[string]func(*tables){
		"a row is taken if it is missing or free":                          (*tables).takesFreeRows,
		"a row is taken from a session that is gone, if it names the same": (*tables).takesFromTheGone,
		"of several rows one is taken, the one that was taken longest ago": (*tables).takesOne,
		"a row is freed by its session and token":                          (*tables).frees,
		"the rows of a session are read in order":                          (*tables).readsOwned,
		"the sessions that rows name are read with their records":          (*tables).readsSessions,
		"rows that are free for a day are deleted":                         (*tables).prunes,
		"the rows of kinds are listed, and those that are free forgotten":  (*tables).listsAndForgets,
		"owners are asked for rows, until other sessions own them":         (*tables).asks,
		"a row is moved if its claim is the one that was seen":             (*tables).moves,
		"rows that are locked are left":                                    (*tables).leavesLockedRows,
	} {
		t.Run(name, func(t *testing.T) {
			d.T = t
			for _, s := range must(d.Sessions(t.Context(), testkit.Patience))(t) { // of the rules before
				for _, r := range d.owned(s.ID) {
					d.free(r)
				}
			}
			rule(d)
		})
	}
}

// must returns what a call has returned, or fails the test that is given.
func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

// begin makes the record of a session.
func (d *tables) begin(session string) tenure.Object {
	d.Helper()
	key := claims.SessionKey(session)
	return must(d.store.PutIf(d.Context(), tenure.Object{Key: key, Payload: []byte("{}"), Labels: map[string]string{"a": "b"}}, tenure.Unconditional()))(d.T)
}

func (d *tables) removeSession(session string) {
	d.Helper()
	key := claims.SessionKey(session)
	o := must(d.store.Get(d.Context(), key))(d.T)
	require.NoError(d, d.store.DeleteIf(d.Context(), key, tenure.IfVersion(o.Version)))
}

func (d *tables) take(session string, ids, gone, missing []string) []objects.Claim {
	d.Helper()
	rows := must(d.Take(d.Context(), session, "tenant", ids, gone, missing, testkit.Patience))(d.T)
	slices.SortFunc(rows, func(a, b objects.Claim) int { return cmp.Compare(a.ID, b.ID) })
	for _, r := range rows {
		require.Equal(d, objects.Claim{Kind: "tenant", ID: r.ID, Session: session, Token: r.Token}, r)
	}
	return rows
}

func (d *tables) look(id string) objects.Claim {
	d.Helper()
	rows := must(d.Look(d.Context(), "tenant", []string{id, "there is none"}, testkit.Patience))(d.T)
	require.Len(d, rows, 1)
	return rows[0]
}

func (d *tables) owned(session string) []objects.Claim {
	d.Helper()
	return must(d.Owned(d.Context(), session, "", "", 1000, testkit.Patience))(d.T)
}

func (d *tables) free(r objects.Claim) {
	d.Helper()
	require.Empty(d, must(d.Free(d.Context(), r.Session, r.Kind, []string{r.ID}, []int64{r.Token}, objects.Freeing{}, testkit.Patience))(d.T))
}

func (d *tables) takesFreeRows() {
	d.begin("a")
	d.begin("b")
	before := time.Now().UnixMicro()
	first := d.take("a", nil, nil, []string{"f1", "f2"})
	require.Equal(d, []string{"f1", "f2"}, idsOf(first))
	require.GreaterOrEqual(d, first[0].Token, before)
	require.Equal(d, first[0], d.look("f1"))
	require.Empty(d, d.take("b", []string{"f1"}, nil, []string{"f2"}), "another's")
	require.Empty(d, d.take("a", []string{"f1"}, nil, []string{"f2"}), "its own already")
	require.Empty(d, d.take("b", []string{"f1"}, []string{"c"}, nil))
	d.free(first[0])
	require.Equal(d, objects.Claim{Kind: "tenant", ID: "f1", Token: first[0].Token}, d.look("f1"))
	ahead := time.Now().Add(time.Hour).UnixMicro()
	d.setToken("f1", ahead)
	second := d.take("b", []string{"f1", "f2"}, nil, nil)
	require.Equal(d, []objects.Claim{{Kind: "tenant", ID: "f1", Session: "b", Token: ahead + 1}}, second)
	require.Empty(d, must(d.Look(d.Context(), "other", []string{"f1"}, testkit.Patience))(d.T))
}

func (d *tables) takesFromTheGone() {
	d.begin("b")
	d.begin("c")
	first := d.take("gone", nil, nil, []string{"g1", "g2"})
	require.True(d, d.look("g1").Gone)
	taken := d.take("b", []string{"g1"}, []string{"gone"}, nil)
	require.Len(d, taken, 1)
	require.Greater(d, taken[0].Token, first[0].Token)
	require.False(d, d.look("g1").Gone)
	require.Empty(d, d.take("c", []string{"g1"}, []string{"gone"}, nil), "b was faster")
	d.removeSession("b")
	require.True(d, d.look("g1").Gone)
	require.Len(d, d.take("c", []string{"g1"}, []string{"b"}, nil), 1)
}

func (d *tables) takesOne() {
	for _, session := range []string{"a", "b", "c"} {
		d.begin(session)
	}
	one := func(session string, gone ...string) (id string) {
		d.Helper()
		rows := must(d.TakeOne(d.Context(), session, "tenant", []string{"o1", "o2", "o3", "none"}, gone, testkit.Patience))(d.T)
		for _, r := range rows {
			require.Empty(d, id)
			id = r.ID
			require.Equal(d, session, r.Session)
			require.Equal(d, r, d.look(id))
		}
		return id
	}
	require.Empty(d, one("a"), "there are none")
	var rows []objects.Claim
	for _, id := range []string{"o2", "o1", "o3"} {
		rows = append(rows, d.take("a", nil, nil, []string{id})...)
	}
	require.Empty(d, one("b"))
	require.Equal(d, "o2", one("b", "a"), "the session counts as gone")
	d.free(rows[2])
	d.free(rows[1])
	require.Equal(d, "o1", one("b"))
	require.Equal(d, "o3", one("c"))
	require.Empty(d, one("a"))
	require.Greater(d, d.look("o3").Token, rows[2].Token)

	if d.lock != nil {
		d.free(d.look("o1"))
		d.free(d.look("o3"))
		unlock := d.lock(d.look("o1"))
		require.Equal(d, "o3", one("a"), "o1 is locked")
		require.Empty(d, one("a"))
		unlock()
		require.Equal(d, "o1", one("a"))
	}
}

func (d *tables) frees() {
	d.begin("a")
	rows := d.take("a", nil, nil, []string{"r1", "r2", "r3"})
	tokens := []int64{rows[0].Token, rows[1].Token + 1, rows[2].Token}
	left := must(d.Free(d.Context(), "a", "tenant", []string{"r1", "r2", "none"}, tokens, objects.Freeing{}, testkit.Patience))(d.T)
	require.Empty(d, left)
	require.Equal(d, []objects.Claim{rows[1], rows[2]}, d.owned("a"), "another token, and not asked for")
	require.Empty(d, must(d.Free(d.Context(), "b", "tenant", []string{"r3"}, tokens[2:], objects.Freeing{}, testkit.Patience))(d.T))
	require.Empty(d, must(d.Free(d.Context(), "a", "other", []string{"r3"}, tokens[2:], objects.Freeing{}, testkit.Patience))(d.T))
	require.Equal(d, []objects.Claim{rows[1], rows[2]}, d.owned("a"), "another session, another kind")
}

func (d *tables) readsOwned() {
	d.begin("a")
	var ids []string
	for i := range 30 {
		ids = append(ids, fmt.Sprintf("o%02d", 29-i))
	}
	d.take("a", nil, nil, ids)
	_, err := d.Take(d.Context(), "a", "earlier", nil, nil, []string{"x"}, testkit.Patience)
	require.NoError(d, err)
	slices.Sort(ids)
	require.Equal(d, append([]string{"x"}, ids[:19]...), idsOf(must(d.Owned(d.Context(), "a", "", "", 20, testkit.Patience))(d.T)))
	rest := must(d.Owned(d.Context(), "a", "earlier", "x", 100, testkit.Patience))(d.T)
	require.Equal(d, ids, idsOf(rest), "after those of the other kind")
	rest = must(d.Owned(d.Context(), "a", "tenant", "o27", 100, testkit.Patience))(d.T)
	require.Equal(d, ids[28:], idsOf(rest))
}

func (d *tables) readsSessions() {
	before := time.Now()
	o := d.begin("a")
	d.begin("owns nothing")
	d.take("a", nil, nil, []string{"s1", "s2"})
	d.take("gone", nil, nil, []string{"s3"})
	time.Sleep(20 * time.Millisecond)
	sessions := must(d.Sessions(d.Context(), testkit.Patience))(d.T)
	require.Len(d, sessions, 2)
	require.Equal(d, objects.Session{ID: "gone", Gone: true, Server: sessions[0].Server}, sessions[1])
	r := sessions[0].Record
	require.Equal(d, "a", sessions[0].ID)
	require.Equal(d, objects.ID{Type: objects.SessionType, ID: "a"}, r.ID)
	require.Equal(d, o.Payload, r.Payload)
	require.Equal(d, o.Labels, objects.DecodeLabels(r.Labels))
	require.Equal(d, o.Version, r.Version)
	require.True(d, o.UpdatedAt.Equal(objects.Stamp(r.Updated)), "to the millisecond")
	listed := must(d.store.(tenure.Lister).List(d.Context(), objects.SessionType, "", 1))(d.T)
	require.True(d, o.UpdatedAt.Equal(listed[0].UpdatedAt), "to the millisecond")
	require.GreaterOrEqual(d, r.Age, 18*time.Millisecond)
	require.LessOrEqual(d, r.Age, time.Since(before)+time.Millisecond)
}

func (d *tables) asks() {
	d.begin("a")
	d.begin("b")
	rows := d.take("a", nil, nil, []string{"w1", "w2", "w3"})
	d.free(rows[2])
	for range 2 { // a second time changes nothing
		require.Equal(d, rows[1:2], must(d.Request(d.Context(), "tenant", []string{"w2", "w3", "none"}, testkit.Patience))(d.T))
	}
	wanted := func(session string, after objects.Claim) []objects.Claim {
		d.Helper()
		return must(d.Wanted(d.Context(), session, after, 10, testkit.Patience))(d.T)
	}
	require.Equal(d, rows[1:2], wanted("a", objects.Claim{}))
	require.Empty(d, wanted("a", rows[1]))
	sessions := must(d.Sessions(d.Context(), testkit.Patience))(d.T)
	require.Equal(d, []bool{true}, []bool{sessions[0].Wanted})
	d.free(rows[1])
	next := d.take("b", []string{"w2"}, nil, nil)
	require.Len(d, next, 1)
	require.Empty(d, wanted("b", objects.Claim{}), "the next owner was not asked")
	ended := rows[1]
	ended.Gone = true
	require.Equal(d, []objects.Claim{ended}, wanted("a", objects.Claim{}))
	require.Empty(d, wanted("a", objects.Claim{}), "its request was deleted")
	if d.lock != nil {
		unlock := d.lock(next[0])
		defer unlock()
		require.Len(d, must(d.Request(d.Context(), "tenant", []string{"w1", "w2"}, testkit.Patience))(d.T), 2)
		require.Equal(d, next, wanted("b", objects.Claim{}))
	}
}

func (d *tables) moves() {
	for _, session := range []string{"m-a", "m-b", "m-c"} {
		d.begin(session)
	}
	rows := d.take("m-a", nil, nil, []string{"m1", "m2", "m3"})
	move := func(session string, seen ...objects.Claim) (moved, locked []objects.Claim) {
		d.Helper()
		moved, locked, err := d.Move(d.Context(), session, "tenant", seen, testkit.Patience)
		require.NoError(d, err)
		return moved, locked
	}
	other := rows[1]
	other.Token++
	another := rows[2]
	another.Session = "m-c"
	moved, locked := move("m-b", rows[0], other, another, objects.Claim{Kind: "tenant", ID: "none", Session: "m-a", Token: 1})
	require.Empty(d, locked)
	require.Len(d, moved, 1, "another token, another session, and no row")
	require.Equal(d, objects.Claim{Kind: "tenant", ID: "m1", Session: "m-b", Token: moved[0].Token}, moved[0])
	require.Greater(d, moved[0].Token, rows[0].Token)
	require.Equal(d, moved[0], d.look("m1"))
	require.Equal(d, rows[1:], d.owned("m-a"))
	again, _ := move("m-c", rows[0])
	require.Empty(d, again, "b was faster")
	d.free(rows[0])
	require.Equal(d, moved[0], d.look("m1"), "what the old owner frees is not the new claim")

	ended := rows[0]
	ended.Gone = true
	require.Equal(d, []objects.Claim{ended}, must(d.Wanted(d.Context(), "m-a", objects.Claim{}, 10, testkit.Patience))(d.T), "its owner is told")
	require.Empty(d, must(d.Wanted(d.Context(), "m-a", objects.Claim{}, 10, testkit.Patience))(d.T))

	ahead := time.Now().Add(time.Hour).UnixMicro()
	d.setToken("m1", ahead)
	moved[0].Token = ahead
	moved, _ = move("m-c", moved[0])
	require.Equal(d, ahead+1, moved[0].Token)
	if d.lock != nil {
		unlock := d.lock(rows[1])
		moved, locked = move("m-b", rows[1], rows[2])
		require.Equal(d, rows[1:2], locked)
		require.Equal(d, []string{"m3"}, idsOf(moved))
		unlock()
	}
}

func (d *tables) prunes() {
	prune := func(after int64, n int) (last int64, pruned int) {
		d.Helper()
		last, pruned, err := d.Prune(d.Context(), after, n, testkit.Patience)
		require.NoError(d, err)
		return last, pruned
	}
	// Earlier rules left requests, some of them unread.
	prune(0, 1000)
	must(d.Wanted(d.Context(), "a", objects.Claim{}, 1000, testkit.Patience))(d.T)
	d.begin("a")
	rows := d.take("a", nil, nil, []string{"p1", "p2", "p3"})
	d.free(rows[0])
	d.free(rows[1])
	long := time.Now().Add(-objects.TombstoneAge - time.Minute).UnixMicro()
	d.setToken("p1", long)
	d.setToken("p3", long)
	require.Len(d, must(d.Request(d.Context(), "tenant", []string{"p3"}, testkit.Patience))(d.T), 1)
	_, pruned := prune(0, 10)
	require.Equal(d, 1, pruned)
	require.Empty(d, must(d.Look(d.Context(), "tenant", []string{"p1"}, testkit.Patience))(d.T))
	require.Equal(d, rows[1].Token, d.look("p2").Token)
	require.Equal(d, long, d.look("p3").Token)

	more := d.take("a", nil, nil, []string{"p4", "p5", "p6"})
	for i, r := range more {
		d.free(r)
		d.setToken(r.ID, long+int64(i))
	}
	last, pruned := prune(0, 2)
	require.Equal(d, 2, pruned)
	_, pruned = prune(last, 2)
	require.Equal(d, 1, pruned, "the rest")
	require.Len(d, must(d.Wanted(d.Context(), "a", objects.Claim{}, 10, testkit.Patience))(d.T), 1, "its claim stands, whatever its age")
	d.setToken("p3", long+1) // as if it had been claimed again, by a session that ended since
	prune(0, 10)
	d.removeSession("a")
	require.Len(d, must(d.Wanted(d.Context(), "a", objects.Claim{}, 10, testkit.Patience))(d.T), 1, "its session, which lived, had not read it")

	d.begin("a")
	rows = d.take("a", nil, nil, []string{"p7"})
	require.Len(d, must(d.Request(d.Context(), "tenant", []string{"p7"}, testkit.Patience))(d.T), 1)
	d.setToken("p7", rows[0].Token+1)
	d.removeSession("a")
	prune(0, 10)
	require.Empty(d, must(d.Wanted(d.Context(), "a", objects.Claim{}, 10, testkit.Patience))(d.T))
}

func (d *tables) listsAndForgets() {
	d.begin("a")
	rows := d.take("a", nil, nil, []string{"listed1", "listed2"})
	gone := d.take("gone", nil, nil, []string{"listed3"})
	d.free(rows[0])
	listed, at, err := d.OfKinds(d.Context(), []string{"tenant", "none"}, testkit.Patience)
	require.NoError(d, err)
	require.Contains(d, listed, rows[1])
	require.NotContains(d, idsOf(listed), "listed1", "it is free")
	require.NotContains(d, idsOf(listed), gone[0].ID, "its session has no record")
	require.WithinDuration(d, time.Now(), at, time.Minute)
	listed, _, err = d.OfKinds(d.Context(), []string{"none"}, testkit.Patience)
	require.NoError(d, err)
	require.Empty(d, listed)

	require.NoError(d, d.Forget(d.Context(), "tenant", testkit.Patience))
	require.Empty(d, must(d.Look(d.Context(), "tenant", []string{"listed1"}, testkit.Patience))(d.T))
	require.Equal(d, rows[1].Token, d.look("listed2").Token)
	require.Equal(d, gone[0].Token, d.look("listed3").Token)
}

func (d *tables) leavesLockedRows() {
	if d.lock == nil {
		d.Skip("a write locks the whole database")
	}
	d.begin("a")
	rows := d.take("a", nil, nil, []string{"l1", "l2"})
	unlock := d.lock(rows[0])
	began := time.Now()
	left := must(d.Free(d.Context(), "a", "tenant", idsOf(rows), []int64{rows[0].Token, rows[1].Token}, objects.Freeing{}, time.Minute))(d.T)
	require.Equal(d, rows[:1], left)
	unlock()
	d.free(rows[0])
	unlock = d.lock(rows[0])
	taken := must(d.Take(d.Context(), "b", "tenant", idsOf(rows), nil, nil, time.Minute))(d.T)
	require.Equal(d, []string{"l2"}, idsOf(taken))
	require.Less(d, time.Since(began), 10*time.Second, "no statement waits for the lock")
	unlock()
}

func idsOf(rows []objects.Claim) (ids []string) {
	for _, r := range rows {
		ids = append(ids, r.ID)
	}
	return ids
}
