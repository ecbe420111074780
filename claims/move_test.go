package claims_test

import (
	"context"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// moveTo moves a key to a process, from its present owner.
func (p *process) moveTo(id string) claims.Claim {
	p.w.Helper()
	seen, err := p.keys.Standing(context.Background(), id)
	require.NoError(p.w, err)
	got, err := p.keys.Move(context.Background(), seen...)
	require.NoError(p.w, err)
	require.Len(p.w, got, 1)
	require.Greater(p.w, got[0].Token, seen[0].Token)
	require.True(p.w, p.keys.Holds(got[0]))
	return got[0]
}

// untilTold runs a func that the jobs of the world do not see: two may run until the owner is told.
func (p *process) untilTold(c claims.Claim) (returned chan error) {
	returned = make(chan error, 1)
	began := make(chan struct{})
	go func() {
		returned <- p.keys.Do(context.Background(), c, func(ctx context.Context) error {
			close(began)
			<-ctx.Done()
			return nil
		})
	}()
	<-began
	return returned
}

func TestAMovedClaimIsTheMoversAtOnce(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) tenure.Database{
		"sqlite": func(t *testing.T) tenure.Database {
			return testkit.OpenSQLite(t, filepath.Join(t.TempDir(), "tenure.db"))
		},
		"postgres": func(t *testing.T) tenure.Database {
			return testkit.OpenPostgres(t, testkit.PostgresURL(t), tenure.PostgresConfig{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := open(t)
			w := newWorld(t, store)
			a, b := w.start("a"), w.start("b")
			one, two := a.claimOne("one"), a.claimOne("two")
			returned := a.untilTold(one)
			mine := b.moveTo("one")

			for c, want := range map[claims.Claim]error{one: tenure.ErrLost, mine: nil, two: nil} {
				fenced, err := tenure.Fence(store, c)
				require.NoError(t, err)
				_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "note", ID: c.Session + c.Key.ID}, Name: c.Session + c.Key.ID}, tenure.Unconditional())
				require.ErrorIs(t, err, want)
			}
			select {
			case err := <-returned: // long before any TTL
				require.ErrorIs(t, err, tenure.ErrLost)
			case <-time.After(testkit.Patience):
				t.Fatal("its owner is not told")
			}
			require.ErrorIs(t, a.keys.Release(t.Context(), one), tenure.ErrLost)
			require.ErrorIs(t, claims.ReleaseDetached(t.Context(), store, one), tenure.ErrLost)
			require.True(t, a.keys.Holds(two))
			require.Empty(t, a.claim("one"))
			require.Equal(t, []objects.Claim{rowOf(mine)}, w.owned(b.session.ID()))
		})
	}
}

func TestAnOwnerIsToldOfAMoveInNoTime(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claim(names(1200)...)
		idle, c := a.claimOne("idle"), a.claimOne("one")
		returned := a.untilTold(c)
		began := time.Now()
		b.moveTo("one")
		b.moveTo("idle")
		require.ErrorIs(w, <-returned, tenure.ErrLost)
		time.Sleep(2 * coalesced)
		require.Less(w, time.Since(began), time.Second)
		require.False(w, a.keys.Holds(idle))
		require.Equal(w, 1200, a.keys.Len())
		require.Equal(w, 2, b.keys.Len())
		a.moveTo("one") // and back

		seen, err := b.keys.Standing(w.Context(), names(1200)...) // more notices than are read at once
		require.NoError(w, err)
		_, err = b.keys.Move(w.Context(), seen...)
		require.NoError(w, err)
		time.Sleep(time.Second)
		require.Equal(w, 1, a.keys.Len())
	})
}

// coalesced is the time between two looks at requests.
const coalesced = 100 * time.Millisecond

func TestAnOwnerHearsOfAMoveEvenIfNobodyIsWoken(t *testing.T) {
	for name, owns := range map[string][]string{"its only claim": {"one"}, "one of two": {"one", "two"}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a, b := w.start("a"), w.start("b")
				var one claims.Claim
				for _, c := range a.claim(owns...) {
					if c.Key.ID == "one" {
						one = c
					}
				}
				returned := a.untilTold(one)
				b.fault(testkit.Only("wake", testkit.Refuse))
				began := time.Now()
				b.moveTo("one")
				require.ErrorIs(w, <-returned, tenure.ErrLost)
				require.Less(w, time.Since(began), 2*ttl)
			})
		})
	}
}

// The notice is read once, and a comparison of all claims makes up for it.
func TestAnOwnerHearsOfAMoveEvenIfTheAnswerIsLost(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claim(names(3)...)
		returned := a.untilTold(a.claimOne("one"))
		a.fault(testkit.Only("claims.requested", testkit.LoseAnswer))
		began := time.Now()
		b.moveTo("one")
		time.Sleep(time.Second)
		a.fault(nil)
		require.NoError(w, b.w.deleteRequests())
		require.ErrorIs(w, <-returned, tenure.ErrLost)
		require.Less(w, time.Since(began), 3*ttl)
		require.Equal(w, 3, a.keys.Len())
	})
}

// deleteRequests deletes the requests for claims that have ended, as an hourly sweep does.
func (w *world) deleteRequests() error {
	_, _, err := w.table.Prune(context.Background(), 0, 1000, time.Second)
	return err
}

// A claim can be moved before the answer to the statement that made it has come.
func TestAClaimThatWasMovedBeforeItsAnswerCameIsNotHeld(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claimOne("other")
		a.fault(testkit.Only("claims.take", testkit.AnswerAfter(2*time.Second)))
		claimed := make(chan []claims.Claim, 1)
		go func() { claimed <- a.claim("one") }()
		time.Sleep(time.Second)
		b.moveTo("one")
		time.Sleep(2 * time.Second)
		got := <-claimed
		require.Len(w, got, 1)
		require.False(w, a.keys.Holds(got[0]))
		require.Equal(w, 1, a.keys.Len())
	})
}

func TestOfTwoWhoMoveAClaimOneGetsIt(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b, c := w.start("a"), w.start("b"), w.start("c")
		seen := a.claimOne("one")
		got, err := b.keys.Move(w.Context(), seen)
		require.NoError(w, err)
		require.Len(w, got, 1)
		late, err := c.keys.Move(w.Context(), seen)
		require.NoError(w, err)
		require.Empty(w, late)
		late, err = b.keys.Move(w.Context(), got[0], seen)
		require.ErrorIs(w, err, tenure.ErrInvalid, "given twice")
		require.Empty(w, late)
		late, err = b.keys.Move(w.Context(), got[0])
		require.NoError(w, err)
		require.Empty(w, late, "it is its own already")
		_, err = b.keys.Move(w.Context())
		require.ErrorIs(w, err, tenure.ErrInvalid)
		_, err = b.keys.Move(w.Context(), claims.Claim{Key: tenure.Key{Type: "another", ID: "one"}, Session: "s", Token: 1})
		require.ErrorIs(w, err, tenure.ErrInvalid)
		require.True(w, b.keys.Holds(got[0]))
	})
}

func TestARowWhoseMoveGotNoAnswerIsFreed(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		seen := a.claimOne("one")
		b.fault(testkit.Only("claims.move", testkit.LoseAnswer))
		_, err := b.keys.Move(w.Context(), seen)
		require.Error(w, err)
		b.fault(nil)
		require.Equal(w, "one", a.wait("one").Key.ID)
		synctest.Wait()
	})
}

// No key runs twice in one session: not even the key that it has lost to another and moves back.
func TestAKeyWhoseFuncStillRunsIsNotMovedBack(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		go func() {
			_ = a.keys.Do(context.Background(), a.claimOne("one"), func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(10 * time.Second)
				return nil
			})
		}()
		time.Sleep(time.Second)
		mine := b.moveTo("one")
		time.Sleep(time.Second)
		got, err := a.keys.Move(w.Context(), mine)
		require.NoError(w, err)
		require.Empty(w, got)
		time.Sleep(10 * time.Second)
		require.Len(w, must(a.keys.Move(w.Context(), mine))(w.T), 1)
	})
}

// The mover frees the key while the former owner's func still runs, so that its hint comes too early for callers of
// that process.
func TestACallerGetsAKeyThatWasMovedAwayAsSoonAsTheFuncOfItsProcessHasReturned(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.startWith("a", claims.SessionConfig{PollInterval: time.Hour}), w.start("b")
		var freed time.Time
		c := a.claimOne("one")
		go func() {
			_ = a.keys.Do(context.Background(), c, func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(5 * time.Second)
				freed = time.Now()
				return nil
			})
		}()
		time.Sleep(time.Second)
		moved := b.moveTo("one")
		time.AfterFunc(time.Second, func() { _ = b.keys.Release(context.Background(), moved) })
		a.wait("one")
		require.Less(w, time.Since(freed), time.Second)
	})
}
