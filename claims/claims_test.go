package claims_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func TestAKeyHasOneOwner(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		got := a.claim("one", "two")
		require.Len(w, got, 2)
		require.True(w, a.keys.Holds(got[0]))
		require.False(w, b.keys.Holds(got[0]))
		require.Empty(w, b.claim("one", "two"))
		require.Empty(w, a.claim("one"), "it has been claimed already")
		require.Equal(w, 2, a.keys.Len())

		owner, err := b.keys.Owner(w.Context(), "one")
		require.NoError(w, err)
		require.Equal(w, "a", owner.Holder)
		_, err = b.keys.Owner(w.Context(), "three")
		require.ErrorIs(w, err, tenure.ErrNotFound)

		require.NoError(w, a.keys.Release(w.Context(), got...))
		require.False(w, a.keys.Holds(got[0]))
		_, err = b.keys.Owner(w.Context(), "one")
		require.ErrorIs(w, err, tenure.ErrNotFound)
		after := b.claim("one", "two")
		require.Len(w, after, 2)
		require.Greater(w, after[0].Token, got[0].Token)
	})
}

func TestAClaimIsAValue(t *testing.T) {
	c := claims.Claim{Key: tenure.Key{Type: "tenant", ID: "a/b"}, Session: "s", Token: 7}
	text, err := json.Marshal(c)
	require.NoError(t, err)
	require.Equal(t, `{"key":"tenant/a/b","session":"s","token":7}`, string(text))
	var back claims.Claim
	require.NoError(t, json.Unmarshal(text, &back))
	require.Equal(t, c, back)
}

// S5.
func TestAKeyIsFreedOnlyAfterItsFuncHasReturned(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		c := a.claimOne("one")
		returned := a.work(c, time.Minute)
		synctest.Wait()
		require.ErrorIs(w, a.keys.Do(w.Context(), c, testkit.Succeeds), tenure.ErrInvalid, "a func runs")

		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		require.ErrorIs(w, a.keys.Release(ctx, c), context.DeadlineExceeded)
		require.Empty(w, b.claim("one"))
		require.NoError(w, a.keys.Release(w.Context(), c))
		require.ErrorIs(w, <-returned, tenure.ErrResigned)
		next := b.claimOne("one")
		require.ErrorIs(w, a.keys.Do(w.Context(), c, testkit.Succeeds), tenure.ErrLost)
		require.NoError(w, b.keys.Do(w.Context(), next, testkit.Succeeds))
		a.claimOne("one") // Do has freed it
	})
}

// S5.
func TestACloseFreesEachKeyWhenItsFuncHasReturnedAndTheRecordLast(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		quick, slow := a.claimOne("quick"), a.claimOne("slow")
		a.claimOne("idle")
		a.work(quick, time.Second)
		a.work(slow, 10*time.Minute)
		synctest.Wait()
		began, id := time.Now(), a.session.ID()
		closed := make(chan struct{})
		go func() { a.stop(); close(closed) }()

		time.Sleep(10 * time.Millisecond)
		b.claimOne("idle")
		_, err := a.keys.TryClaim(w.Context(), "another")
		require.ErrorIs(w, err, claims.ErrClosed)
		time.Sleep(time.Second)
		b.claimOne("quick")
		time.Sleep(5 * time.Minute)
		require.Empty(w, b.claim("slow"), "the session is renewed as long as a func runs")
		<-closed
		require.Equal(w, 10*time.Minute, time.Since(began).Round(time.Second))
		b.claimOne("slow")
		require.Empty(w, w.owned(id))
		_, err = w.store.Get(w.Context(), claims.SessionKey(id))
		require.ErrorIs(w, err, tenure.ErrNotFound)
	})
}

// S5.
// A page of keys that is freed late may be free after the last one.
func TestWhoWaitsHearsOfEachKeyThatACloseFrees(t *testing.T) {
	for _, n := range []int{60, 100} { // the last page is full, or it is not
		inBubble(t, func(w *world) {
			a, b := w.start("a"), w.start("b")
			ids := names(n)
			a.claim(ids...)
			var pages atomic.Int64
			a.fault(testkit.Only("claims.free", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
				if pages.Add(1) == 2 {
					time.Sleep(time.Second)
				}
				return do(ctx)
			}))
			all := make(chan struct{})
			go func() {
				defer close(all)
				for left := n; left > 0; {
					claimed, err := b.keys.Claim(w.Context(), ids...)
					if left -= len(claimed); err != nil {
						return
					}
				}
			}()
			synctest.Wait()
			a.stop()
			freed := time.Now()
			<-all
			require.Less(w, time.Since(freed), 100*time.Millisecond, "all are claimed when all are free")
		})
	}
}

func TestACloseFreesSomeKeysWhileItFreesOthers(t *testing.T) {
	inBubble(t, func(w *world) {
		const statements, each = 10, 500 * time.Millisecond // for 20, 40, … keys and then a thousand each
		a := w.start("a")
		a.claim(names(5000)...)
		id, began := a.session.ID(), time.Now()
		var n atomic.Int64
		slowly := testkit.Slowly(each)
		a.fault(testkit.Only("claims.free", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			n.Add(1)
			return slowly(ctx, call, do)
		}))
		a.stop()
		require.Empty(w, w.owned(id))
		require.EqualValues(w, statements, n.Load())
		require.Less(w, time.Since(began), statements*each*3/4)
	})
}

func TestAPanicOfAFuncFreesItsKey(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		require.Panics(w, func() {
			_ = a.keys.Do(w.Context(), a.claimOne("one"), func(context.Context) error { panic("oops") })
		})
		b.claimOne("one")
	})
}

// S4.
func TestWhatACrashedProcessOwnedIsFreeWhenItsSessionHasExpired(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.claim(names(100)...)
		time.Sleep(10*time.Second + 100*time.Millisecond) // the last renewal was 100 ms ago
		a.crash()
		last := time.Now().Add(-100 * time.Millisecond)
		b := w.start("b")
		got, err := b.keys.Claim(w.Context(), "t000042")
		require.NoError(w, err)
		require.Len(w, got, 1)
		took := time.Since(last)
		require.GreaterOrEqual(w, took, ttl)
		require.LessOrEqual(w, took, ttl+20*time.Millisecond)
	})
}

// The row still names a's session, but that has no record any more.
func TestAWaitHasAKeyOfTheDeadBeforeItsRowIsFree(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		began := time.Now()
		a.claimOne("one")
		a.crash()
		b.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "claims.owned" || call.Op == "claims.free" {
				return testkit.Hang(ctx, call, do)
			}
			return do(ctx)
		})
		ctx, cancel := context.WithTimeout(w.Context(), 2*ttl)
		defer cancel()
		got, err := b.keys.Claim(ctx, "one")
		require.NoError(w, err)
		require.Len(w, got, 1)
		require.LessOrEqual(w, time.Since(began), ttl+20*time.Millisecond)
	})
}

// S4: b has looked at the sessions when a owned nothing, and looks again when its own TTL has
// passed.
func TestASessionWithAShorterTTLIsRemovedWhenItHasExpired(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.startWith("b", claims.SessionConfig{TTL: time.Hour})
		time.Sleep(time.Second)
		a := w.start("a")
		synctest.Wait()
		began := time.Now()
		time.Sleep(time.Second)
		a.claimOne("one")
		a.crash()
		got, err := b.keys.Claim(w.Context(), "one")
		require.NoError(w, err)
		require.Len(w, got, 1)
		require.LessOrEqual(w, time.Since(began), ttl+20*time.Millisecond)
	})
}

// S4: a has renewed its session just before b looked, owned nothing then, and takes the key of c. Nothing tells
// b, which hardly ever polls.
func TestASessionThatOwnedNothingAtTheLastLookIsRemovedWhenItHasExpired(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		synctest.Wait()
		began := time.Now()
		time.Sleep(9 * time.Second)
		c := w.start("c")
		held := c.claimOne("one")
		c.fault(testkit.Only("wake", testkit.Refuse))
		b := w.startWith("b", claims.SessionConfig{PollInterval: time.Hour})
		got := make(chan []claims.Claim, 1)
		go func() {
			claimed, _ := b.keys.Claim(w.Context(), "one")
			got <- claimed
		}()
		time.Sleep(100 * time.Millisecond)
		require.NoError(w, c.keys.Release(w.Context(), held))
		a.claimOne("one")
		a.crash()
		require.Len(w, <-got, 1)
		require.LessOrEqual(w, time.Since(began), ttl+20*time.Millisecond)
	})
}

// S4: the first answer was slow, and later ones are not.
func TestASlowAnswerDoesNotMakeABurialLate(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claimOne("one")
		b.fault(testkit.Only("claims.sessions", testkit.Refuse))
		began := time.Now()
		got := make(chan []claims.Claim, 1)
		go func() {
			claimed, _ := b.keys.Claim(w.Context(), "one")
			got <- claimed
		}()
		time.Sleep(20*time.Second + 100*time.Millisecond)
		a.crash()
		time.Sleep(28900 * time.Millisecond)
		b.fault(testkit.Only("claims.sessions", testkit.AnswerAfter(400*time.Millisecond)))
		w.start("c") // which makes b look
		time.Sleep(400 * time.Millisecond)
		b.fault(nil)
		require.Len(w, <-got, 1)
		require.LessOrEqual(w, time.Since(began), 20*time.Second+ttl+20*time.Millisecond)
	})
}

// S4: a list that is never answered does not keep the sweeper from looking again.
func TestAListThatHangsMakesNoBurialLate(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claimOne("one")
		b.fault(testkit.Only("list", testkit.Hang))
		time.Sleep(10 * ttl) // until it has listed
		id := a.session.ID()
		a.crash()
		time.Sleep(3 * ttl)
		_, err := w.store.Get(w.Context(), claims.SessionKey(id))
		require.ErrorIs(w, err, tenure.ErrNotFound)
	})
}

// An outage is not logged twice a second.
func TestASweeperThatCannotLookPausesLongerAndLonger(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claimOne("one")
		ctx, cancel := context.WithTimeout(w.Context(), 2*time.Minute)
		defer cancel()
		var traffic testkit.Calls
		b.fault(traffic.Count("", testkit.Only("claims.sessions", testkit.Refuse)))
		_, err := b.keys.Claim(ctx, "one")
		require.ErrorIs(w, err, context.DeadlineExceeded)
		require.Less(w, traffic.Take()["claims.sessions"], 35)
	})
}

// S4.
func TestALiveSessionIsNeverRemoved(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		c := a.claimOne("one")
		id := a.session.ID()
		a.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			time.Sleep(time.Second) // slow requests
			return do(ctx)
		})
		ctx, cancel := context.WithTimeout(w.Context(), time.Hour)
		defer cancel()
		_, err := b.keys.Claim(ctx, "one")
		require.ErrorIs(w, err, context.DeadlineExceeded)
		require.Equal(w, id, a.session.ID())
		require.True(w, a.keys.Holds(c))
	})
}

// S4: a session that owned nothing leaves no record either.
func TestTheRecordOfACrashedSessionWithoutClaimsIsDeleted(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		w.start("b")
		time.Sleep(time.Second)
		key := claims.SessionKey(a.session.ID())
		a.crash() // a second after its last renewal
		time.Sleep(ttl - 2*time.Second)
		_, err := w.store.Get(w.Context(), key)
		require.NoError(w, err)
		time.Sleep(2*time.Second + ttl)
		_, err = w.store.Get(w.Context(), key)
		require.ErrorIs(w, err, tenure.ErrNotFound, "a TTL after it has expired")
	})
}

// S6.
func TestAnotherSessionFinishesWhatADeadRemoverBegan(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.claim(names(500)...)
		id := a.session.ID()
		a.crash()
		b := w.start("b")
		b.fault(testkit.Only("claims.free", testkit.Hang))
		removed := func() bool {
			_, err := w.store.Get(w.Context(), claims.SessionKey(id))
			return errors.Is(err, tenure.ErrNotFound)
		}
		for !removed() {
			time.Sleep(10 * time.Millisecond)
		}
		require.NotEmpty(w, w.owned(id))
		b.crash()
		w.start("c")
		time.Sleep(ttl)
		require.Empty(w, w.owned(id))
	})
}

// S6.
func TestRowsOfARemovedSessionThatAreWrittenLateAreFreed(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		w.start("c")
		synctest.Wait() // until all have looked
		rows, err := w.table.Take(w.Context(), "a session that is gone", "tenant", nil, nil, []string{"late", "other"}, time.Second)
		require.NoError(w, err)
		require.Len(w, rows, 2)
		a.claimOne("late") // at once
		_, err = b.keys.Owner(w.Context(), "other")
		require.ErrorIs(w, err, tenure.ErrNotFound)
		time.Sleep(ttl)
		require.Empty(w, w.owned("a session that is gone"))
	})
}

// Keys that are used once, at any rate.
func TestAllRowsThatNobodyHasClaimedForADayAreDeleted(t *testing.T) {
	testkit.Slow(t)
	inBubble(t, func(w *world) {
		a := w.start("a")
		require.NoError(w, a.keys.Release(w.Context(), a.claim(names(5500)...)...))
		a.stop()
		time.Sleep(25 * time.Hour)
		b := w.startWith("b", claims.SessionConfig{TTL: 5 * time.Minute})
		b.claimOne("held")
		require.NoError(w, b.keys.Release(w.Context(), b.claimOne("free")))
		time.Sleep(50 * time.Minute) // it may live no longer
		count := func() (n int) {
			require.NoError(w, w.store.(*tenure.SQLiteStore).DB().QueryRow(`SELECT count(*) FROM objects_claims`).Scan(&n))
			return n
		}
		require.Equal(w, 2, count())
		time.Sleep(26 * time.Hour)
		require.Equal(w, 1, count())
	})
}

// S7.
func TestHoldingManyKeysCostsOneRenewalPerInterval(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		require.Len(w, a.claim(names(1200)...), 1200)
		b.claimOne("another")
		time.Sleep(ttl)
		var traffic testkit.Calls
		a.fault(traffic.Count("", nil))
		time.Sleep(32 * ttl)
		counts := traffic.Take()
		require.InDelta(w, 96, counts["put"], 1)
		require.LessOrEqual(w, counts["claims.sessions"], 43, "once per TTL, at a random moment")
		require.LessOrEqual(w, counts["list"], 43, "with them")
		require.LessOrEqual(w, counts["claims.prune"], 1, "once an hour")
		delete(counts, "put")
		delete(counts, "claims.prune")
		delete(counts, "claims.sessions")
		delete(counts, "list")
		require.Empty(w, counts)
	})
}

func TestALostSessionIsFollowedByAnotherThatRunsNoKeyTwice(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		first := a.claimOne("one")
		other := a.claimOne("two")
		returned := a.work(first, 5*time.Minute) // far too long
		synctest.Wait()
		a.fault(testkit.Refuse)
		time.Sleep(29 * time.Second)
		require.False(w, a.keys.Holds(first))
		a.fault(nil)
		time.Sleep(6 * time.Second)
		require.NotEmpty(w, a.session.ID())
		require.NotEqual(w, first.Session, a.session.ID(), "an ID is never used again")
		require.ErrorIs(w, a.keys.Do(w.Context(), other, testkit.Succeeds), tenure.ErrLost)

		b := w.start("b")
		time.Sleep(time.Minute) // the first session was removed
		var traffic testkit.Calls
		a.fault(traffic.Count("", nil))
		require.Empty(w, a.claim("one"), "its func still runs")
		require.Zero(w, traffic.Take()["claims.take"], "it would be taken and given back again and again")
		again := a.claimOne("two")
		require.NoError(w, a.keys.Do(w.Context(), again, testkit.Succeeds))
		w.jobs.forget("a") // it has overstayed
		b.claimOne("one")
		require.ErrorIs(w, <-returned, tenure.ErrDeadline)
	})
}

func TestAWaitIsWokenWhenTheFuncOfALostSessionReturns(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.startWith("a", claims.SessionConfig{PollInterval: time.Hour})
		returned := a.work(a.claimOne("one"), 5*time.Minute) // far too long
		a.fault(testkit.Refuse)
		time.Sleep(29 * time.Second)
		a.fault(nil)
		time.Sleep(time.Minute) // another session has begun, and the first one was removed
		got := make(chan []claims.Claim)
		go func() {
			c, _ := a.keys.Claim(w.Context(), "one")
			got <- c
		}()
		<-returned
		began := time.Now()
		require.Len(w, <-got, 1)
		require.Less(w, time.Since(began), time.Second)
	})
}

func TestAFuncIsToldBeforeItsKeyCanBeClaimed(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{"refused": testkit.Refuse, "hanging": testkit.Hang} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a, b := w.start("a"), w.start("b")
				a.work(a.claimOne("one"), 8*time.Second) // of the 9 s that it has
				time.Sleep(10*time.Second + 100*time.Millisecond)
				a.fault(fault)
				c, err := b.keys.Claim(w.Context(), "one")
				require.NoError(w, err)
				b.begin(c[0])
				b.end(c[0])
			})
		})
	}
}

// A claim whose answer was lost.
func TestAClaimWhoseAnswerWasLostIsFoundByTheNext(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		time.Sleep(time.Second) // it has swept, and does not look again before the answer is lost
		a.claimOne("known")
		a.fault(testkit.Only("claims.take", testkit.Once(testkit.LoseAnswer)))
		_, err := a.keys.TryClaim(w.Context(), "one", "two")
		require.ErrorIs(w, err, testkit.ErrReset)
		require.Equal(w, 1, a.keys.Len())
		c := a.claimOne("one") // it is returned to the next caller
		require.True(w, a.keys.Holds(c))

		b := w.start("b")
		require.Empty(w, b.claim("one", "two", "known"))
		time.Sleep(time.Minute) // no call wanted this one
		b.claimOne("two")
		require.Empty(w, b.claim("one", "known"))
	})
}

func TestAClaimThatLandsLongAfterItsAnswerWasLostIsFreed(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.claimOne("known")
		a.fault(testkit.Only("claims.take", testkit.Once(func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			go func() {
				time.Sleep(35 * time.Second)
				_ = do(context.WithoutCancel(ctx))
			}()
			return testkit.ErrReset
		})))
		_, err := a.keys.TryClaim(w.Context(), "one")
		require.ErrorIs(w, err, testkit.ErrReset)
		time.Sleep(36 * time.Second)
		require.Empty(w, b.claim("one"))
		time.Sleep(ttl) // from one look to the next
		b.claimOne("one")
	})
}

// It reads all rows that name the session, a thousand at a time, and looks again only at those that it does not know.
func TestAfterALostAnswerTheRowsAreComparedOncePerTTL(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.claim(names(3000)...)
		time.Sleep(time.Second)
		var traffic testkit.Calls
		looked := map[string]int{}
		for _, id := range []string{"one", "two"} {
			a.fault(testkit.Only("claims.take", testkit.Once(testkit.LoseAnswer)))
			_, err := a.keys.TryClaim(w.Context(), id)
			require.ErrorIs(w, err, testkit.ErrReset)
			a.fault(traffic.Count("", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
				if call.Op == "claims.look" {
					for _, id := range call.IDs {
						looked[id]++
					}
				}
				return do(ctx)
			}))
			time.Sleep(3 * ttl)
			require.LessOrEqual(w, traffic.Take()["claims.owned"], 4*4)
		}
		require.Equal(w, map[string]int{"one": 1, "two": 1}, looked)
		require.Equal(w, 3000, a.keys.Len())
		require.Len(w, w.start("b").claim("one", "two"), 2)
		time.Sleep(2 * time.Hour)
		traffic.Take()
		time.Sleep(30 * time.Minute)
		require.LessOrEqual(w, traffic.Take()["claims.owned"], 4, "once an hour, when nothing is in doubt")
	})
}

func TestAClaimThatLandsWhileAnotherOfItsKeyIsBeingFreedIsFreed(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		arrives := []time.Duration{8 * time.Second, 15 * time.Second} // the first is found after 10 s
		a.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			switch call.Op {
			case "claims.take":
				time.AfterFunc(arrives[0], func() { _ = do(context.WithoutCancel(ctx)) })
				arrives = arrives[1:]
				return testkit.ErrReset
			case "claims.free":
				return testkit.LoseAnswer(ctx, call, do)
			}
			return do(ctx)
		})
		for range arrives {
			_, err := a.keys.TryClaim(w.Context(), "one")
			require.ErrorIs(w, err, testkit.ErrReset)
		}
		time.Sleep(time.Minute)
		a.fault(nil)
		time.Sleep(20 * time.Second)
		w.start("b").claimOne("one")
	})
}

// Goroutines of one process take turns.
func TestAWaitForAKeyOfTheOwnSessionEndsWhenItIsReleased(t *testing.T) {
	for name, release := range map[string]func(p *process, c claims.Claim){
		"released": func(p *process, c claims.Claim) { require.NoError(p.w, p.keys.Release(context.Background(), c)) },
		"detached": func(p *process, c claims.Claim) { p.detach(c); p.w.releaseValue(c) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a := w.start("a")
				c := a.claimOne("one")
				time.AfterFunc(3*time.Second, func() { release(a, c) })
				began := time.Now()
				next := a.wait("one")
				require.Equal(w, 3*time.Second, time.Since(began).Round(10*time.Millisecond))
				require.Greater(w, next.Token, c.Token)
			})
		})
	}
}

func TestTheConfigOfASessionHasItsDefaults(t *testing.T) {
	session, err := claims.NewSession(testkit.OpenSQLite(t, ":memory:"), claims.SessionConfig{})
	require.NoError(t, err)
	cfg := session.Config()
	require.Equal(t, []time.Duration{30 * time.Second, time.Second, 10 * time.Second, 20 * time.Second, 5 * time.Second},
		[]time.Duration{cfg.TTL, cfg.Margin, cfg.RenewInterval, cfg.RenewDeadline, cfg.PollInterval})
	require.NotEmpty(t, cfg.Holder)
	require.NotNil(t, cfg.Logger)
}

func TestAReleaseIsRepeatedUntilItIsAnswered(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{"refused": testkit.Refuse, "answers lost": testkit.LoseAnswer, "hanging": testkit.Hang} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a, b := w.start("a"), w.start("b")
				got := a.claim("one", "two")
				a.fault(testkit.Only("claims.free", fault))
				ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
				defer cancel()
				require.ErrorIs(w, a.keys.Release(ctx, got[0]), context.DeadlineExceeded)
				require.Empty(w, a.claim(got[0].Key.ID), "it is being freed")
				a.fault(nil)
				time.Sleep(10 * time.Second)
				require.Len(w, b.claim("one", "two"), 1)
				require.True(w, a.keys.Holds(got[1]))
			})
		})
	}
}

// Close while a claim is under way.
func TestACloseWaitsForAClaimThatIsUnderWay(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{"slow request": testkit.Slowly(2 * time.Second), "slow answer": testkit.AnswerAfter(2 * time.Second)} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a, b := w.start("a"), w.start("b")
				a.claimOne("known")
				var traffic testkit.Calls
				a.fault(testkit.Only("claims.take", traffic.Count("", fault)))
				id, results := a.session.ID(), make(chan error, 2)
				for _, key := range []string{"one", "two"} { // the second waits for the first
					go func() {
						_, err := a.keys.TryClaim(context.Background(), key)
						results <- err
					}()
					synctest.Wait()
				}
				a.stop()
				require.ErrorIs(w, <-results, claims.ErrClosed)
				require.ErrorIs(w, <-results, claims.ErrClosed)
				require.Equal(w, map[string]int{"claims.take": 1}, traffic.Take())
				require.Empty(w, w.owned(id))
				b.claimOne("one")
			})
		})
	}
}

// The caller does not cut a claim off.
func TestACallerThatGivesUpGetsWhatItsStatementHasClaimed(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.claimOne("known")
		a.fault(testkit.Only("claims.take", func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			select {
			case <-time.After(2 * time.Second):
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}))
		ctx, cancel := context.WithTimeout(w.Context(), time.Second)
		defer cancel()
		got, err := a.keys.TryClaim(ctx, names(1500)...)
		require.ErrorIs(w, err, context.DeadlineExceeded)
		require.Len(w, got, 1000)
		require.True(w, a.keys.Holds(got[999]))
		require.Equal(w, 1001, a.keys.Len())
	})
}

func TestWaitIsWokenByARelease(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		c := a.claimOne("one")
		began := time.Now()
		time.AfterFunc(3*time.Second, func() { _ = a.keys.Release(context.Background(), c) })
		got, err := b.keys.Claim(w.Context(), "one", "other")
		require.NoError(w, err)
		require.Equal(w, "other", got[0].Key.ID, "at once")
		got, err = b.keys.Claim(w.Context(), "one")
		require.NoError(w, err)
		require.Len(w, got, 1)
		require.Equal(w, 3*time.Second, time.Since(began).Round(10*time.Millisecond))
	})
}

func TestWaitPollsWhereThereAreNoHints(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		c := a.claimOne("one")
		p, err := claims.NewSession(struct {
			tenure.Store
			backend
		}{testkit.Bare(w.store), w.store}, claims.SessionConfig{Holder: "b", Logger: testkit.Quiet})
		require.NoError(w, err)
		keys, err := claims.NewKeys(p, "tenant")
		require.NoError(w, err)
		ctx, cancel := context.WithCancel(w.Context())
		returned := make(chan error)
		go func() { returned <- p.Run(ctx) }()
		time.AfterFunc(time.Minute, func() { _ = a.keys.Release(context.Background(), c) })
		began := time.Now()
		got, err := keys.Claim(w.Context(), "one")
		require.NoError(w, err)
		require.Len(w, got, 1)
		require.LessOrEqual(w, time.Since(began), time.Minute+5*time.Second)
		cancel()
		require.NoError(w, <-returned)
	})
}

// S3.
func TestTokensIncreaseWhateverTheClockSays(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		c := a.claimOne("one")
		require.NoError(w, a.keys.Release(w.Context(), c))
		ahead := time.Now().Add(time.Hour).UnixMicro()
		_, err := w.store.(*tenure.SQLiteStore).DB().Exec(`UPDATE objects_claims SET token = ?`, ahead)
		require.NoError(w, err)
		c = a.claimOne("one")
		require.Equal(w, ahead+1, c.Token)
		require.NoError(w, a.keys.Release(w.Context(), c))
		require.Equal(w, ahead+2, b.claimOne("one").Token)
	})
}

func TestRowsThatAreFreeForADayAreDeleted(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.startWith("a", claims.SessionConfig{TTL: 20 * time.Minute})
		got := a.claim("one", "two")
		require.NoError(w, a.keys.Release(w.Context(), got[0]))
		time.Sleep(23 * time.Hour)
		count := func() (n int) {
			require.NoError(w, w.store.(*tenure.SQLiteStore).DB().QueryRow(`SELECT count(*) FROM objects_claims`).Scan(&n))
			return n
		}
		require.Equal(w, 2, count())
		time.Sleep(3 * time.Hour)
		require.Equal(w, 1, count())
		require.True(w, a.keys.Holds(got[1]))
		require.Greater(w, a.claimOne(got[0].Key.ID).Token, got[0].Token)
	})
}

func TestBadInputToClaims(t *testing.T) {
	inBubble(t, func(w *world) {
		_, err := claims.NewSession(nil, claims.SessionConfig{})
		require.ErrorIs(w, err, tenure.ErrInvalid)
		_, err = claims.NewSession(storetest.NewMem(), claims.SessionConfig{})
		require.ErrorIs(w, err, errors.ErrUnsupported)
		for _, cfg := range []claims.SessionConfig{{TTL: -1}, {TTL: 24*time.Hour + 1}, {Margin: time.Hour}, {RenewInterval: time.Hour}, {PollInterval: -1}, {Holder: "\xff"}} {
			_, err = claims.NewSession(w.store, cfg)
			require.ErrorIs(w, err, tenure.ErrInvalid, "%+v", cfg)
		}
		a, b := w.start("a"), w.start("b")
		for _, kind := range []string{"", "\xff", "tenant"} {
			_, err = claims.NewKeys(a.session, kind)
			require.ErrorIs(w, err, tenure.ErrInvalid, "%q", kind)
		}
		_, err = claims.NewKeys(nil, "kind")
		require.ErrorIs(w, err, tenure.ErrInvalid)
		for _, ids := range [][]string{nil, {""}, {"one", "two", "one"}, {"one", "\xff"}, {"one", "a\x00"}} {
			_, err = a.keys.TryClaim(w.Context(), ids...)
			require.ErrorIs(w, err, tenure.ErrInvalid, "%q", ids)
			_, err = a.keys.Claim(w.Context(), ids...)
			require.ErrorIs(w, err, tenure.ErrInvalid, "%q", ids)
		}
		_, err = a.keys.Owner(w.Context(), "")
		require.ErrorIs(w, err, tenure.ErrInvalid)
		require.Zero(w, a.keys.Len())
		got := b.claim("one", "two")
		require.Len(w, got, 2, "nothing was claimed")

		mine := a.claimOne("mine")
		require.ErrorIs(w, a.keys.Release(w.Context()), tenure.ErrInvalid)
		require.ErrorIs(w, a.keys.Release(w.Context(), mine, mine), tenure.ErrInvalid)
		require.ErrorIs(w, a.keys.Release(w.Context(), mine, got[0]), tenure.ErrLost, "another session's")
		require.ErrorIs(w, a.keys.Release(w.Context(), claims.Claim{Key: tenure.Key{Type: "other", ID: "x"}}), tenure.ErrInvalid)
		require.True(w, a.keys.Holds(mine), "none was released")
		require.ErrorIs(w, a.keys.Do(w.Context(), got[0], testkit.Succeeds), tenure.ErrLost)
		require.ErrorIs(w, a.keys.Do(w.Context(), mine, nil), tenure.ErrInvalid)
		require.ErrorIs(w, a.session.Run(w.Context()), tenure.ErrInvalid)

		b.stop()
		_, err = b.keys.TryClaim(w.Context(), "one")
		require.ErrorIs(w, err, claims.ErrClosed)
		_, err = b.keys.Claim(w.Context(), "one")
		require.ErrorIs(w, err, claims.ErrClosed)
		require.ErrorIs(w, b.keys.Do(w.Context(), got[0], testkit.Succeeds), tenure.ErrLost)
		require.ErrorIs(w, b.keys.Release(w.Context(), got[0]), tenure.ErrLost)

		_, err = w.store.(*tenure.SQLiteStore).DB().Exec(`DROP TABLE objects_claims`)
		require.NoError(w, err)
		_, err = a.keys.TryClaim(w.Context(), "one")
		require.ErrorIs(w, err, tenure.ErrSetup)
		_, err = a.keys.Claim(w.Context(), "one")
		require.ErrorIs(w, err, tenure.ErrSetup)
	})
}

// Under ExpiryObserved a process judges by what it has seen itself, however long that takes.
func TestASessionWithALongerTTLIsRemovedUnderObserved(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.startWith("a", claims.SessionConfig{Expiry: tenure.ExpiryObserved})
		a.claimOne("one")
		b := w.startWith("b", claims.SessionConfig{Expiry: tenure.ExpiryObserved, TTL: 2 * time.Second})
		a.crash()
		began := time.Now()
		got, err := b.keys.Claim(w.Context(), "one")
		require.NoError(w, err)
		require.Len(w, got, 1)
		require.LessOrEqual(w, time.Since(began), ttl+time.Second)
	})
}

func TestARecordThatNoSessionHasWrittenIsNotLookedAtAllTheTime(t *testing.T) {
	inBubble(t, func(w *world) {
		_, err := w.store.PutIf(w.Context(), tenure.Object{
			Key:     claims.SessionKey("foreign"),
			Payload: []byte(`{"holder":"x","term":"t","ttl_ms":1000}`),
			Labels:  map[string]string{"tenure.unconfirmed": `{"term":"t","before":[{"holder":"y","term":"s"}]}`},
		}, tenure.IfAbsent())
		require.NoError(w, err)
		_, err = w.table.Take(w.Context(), "foreign", "tenant", nil, nil, []string{"one"}, time.Second)
		require.NoError(w, err)
		a := w.start("a")
		var calls testkit.Calls
		a.fault(calls.Count("", nil))
		ctx, cancel := context.WithTimeout(w.Context(), 10*time.Minute)
		defer cancel()
		_, err = a.keys.Claim(ctx, "one")
		require.ErrorIs(w, err, context.DeadlineExceeded)
		require.Less(w, calls.Take()["claims.sessions"], 1000, "in ten minutes")
	})
}

// Another program may have stored anything.
func TestOnSQLiteARowOfAnyContentIsClaimed(t *testing.T) {
	store := testkit.OpenSQLite(t, filepath.Join(t.TempDir(), "tenure.db"))
	w := newWorld(t, store)
	testkit.ExecSQL(t, store.DB(), `INSERT INTO objects_claims (kind, id, session, token) VALUES ('tenant', 'junk', NULL, 'junk'), ('tenant', 'blob', x'676f6e65', 7)`)
	a := w.start("a")
	got := a.claim("junk", "blob")
	require.Len(t, got, 2)
	for _, c := range got {
		require.Positive(t, c.Token)
	}
	require.NoError(t, a.keys.Release(t.Context(), got...))
	require.Len(t, a.claim("junk", "blob"), 2)
}

func TestASessionIsNotHandedOver(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.claimOne("one")
		lease := testkit.NewLease(t, w.store, tenure.LeaseConfig{Key: claims.SessionKey(a.session.ID())})
		require.ErrorIs(w, lease.RequestHandover(w.Context(), "b"), tenure.ErrInvalid)
		require.ErrorIs(w, lease.RequestRelease(w.Context()), tenure.ErrInvalid)
		time.Sleep(time.Minute)
		require.Equal(w, 1, a.keys.Len())
	})
}

// The fence must be that of the func that writes: the job around it may go on after the claim has ended.
func TestANilGuardIsTheClaimOfTheInnermostFunc(t *testing.T) {
	inBubble(t, func(w *world) {
		store := w.store.(*tenure.SQLiteStore)
		none := func(*sql.Tx) error { return nil }
		require.ErrorIs(w, store.Fenced(w.Context(), nil, none), tenure.ErrInvalid)
		lease := testkit.NewLease(w, store, tenure.LeaseConfig{})
		p := w.start("a")
		require.NoError(w, tenure.Do(w.Context(), lease, func(ctx context.Context) error {
			c := p.claimOne("1")
			var inFunc context.Context
			require.NoError(w, p.keys.Do(ctx, c, func(ctx context.Context) error {
				inFunc = context.WithoutCancel(ctx)
				require.NoError(w, tenure.FencedTx(ctx, store, nil, store.DB(), nil, none))
				return store.Fenced(ctx, nil, none)
			}))
			require.ErrorIs(w, store.Fenced(inFunc, nil, none), tenure.ErrLost, "under the claim that has ended")
			require.NoError(w, store.Fenced(ctx, nil, none), "under the term that has not")
			return nil
		}))
	})
}
