package tenure_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/record"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

func TestALeaseIsAcquiredRenewedReadAndReleased(t *testing.T) {
	inBubbles(t, func(t *scene) {
		ctx := t.Context()
		a := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"addr": "10.0.0.1"}})
		began := time.Now()
		term, err := a.TryAcquire(ctx)
		require.NoError(t, err)
		require.Equal(t, 29*time.Second, term.Deadline().Sub(began), "a TTL of 30s less a Margin of 1s")
		time.Sleep(20 * time.Second)
		require.NoError(t, a.Renew(ctx, term))
		require.Equal(t, 29*time.Second, term.Remaining())

		got, err := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"}).Read(ctx)
		require.NoError(t, err)
		require.True(t, got.AcquiredAt.Equal(began) && got.RenewedAt.Equal(began.Add(20*time.Second)), "%+v", got)
		want := tenure.Holding{Key: testkit.LeaseKey, Holder: "a", Term: term.ID(), TTL: 30 * time.Second, Labels: map[string]string{"addr": "10.0.0.1"},
			AcquiredAt: got.AcquiredAt, RenewedAt: got.RenewedAt, Version: got.Version}
		require.Equal(t, want, got)

		require.NoError(t, a.Release(ctx, term))
		require.False(t, term.Valid())
		require.Zero(t, term.Remaining())
		_, err = a.Read(ctx)
		require.ErrorIs(t, err, tenure.ErrNotFound)
		require.ErrorIs(t, a.Renew(ctx, term), tenure.ErrLost)
		require.ErrorIs(t, a.Release(ctx, term), tenure.ErrLost)
	})
}

func TestAHeldLeaseIsRefusedAndTheErrorNamesItsHolder(t *testing.T) {
	inBubbles(t, func(t *scene) {
		b := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
		_, err := b.StealExpired(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound)
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
		for _, try := range []func(context.Context) (*tenure.Term, error){b.TryAcquire, b.StealExpired, b.AcquireOrSteal} {
			_, err := try(t.Context())
			var held *tenure.HeldError
			require.ErrorAs(t, err, &held)
			require.ErrorIs(t, err, tenure.ErrHeld)
			require.Equal(t, "a", held.Holding.Holder)
		}
	})
}

// The record expires each time, and each time another replica is faster.
func TestAnAcquireThatIsOvertakenEachTimeNamesTheHolder(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"})
		testkit.MustAcquire(t, a)
		time.Sleep(time.Hour)
		b := testkit.NewLease(t, storetest.Faulty(t.store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "put" {
				_, err := a.StealExpired(t.Context())
				require.NoError(t, err)
				time.Sleep(time.Hour)
			}
			return do(context.WithoutCancel(ctx)) // the answer is a conflict
		}), tenure.LeaseConfig{Holder: "b"})
		_, err := b.AcquireOrSteal(t.Context())
		var other *tenure.HeldError
		require.ErrorAs(t, err, &other)
		require.Equal(t, "a", other.Holding.Holder)
	})
}

func TestTrustCountsFromTheAttemptNotFromTheAnswer(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease := testkit.NewLease(t, storetest.Faulty(t.store, testkit.AnswerAfter(5*time.Second)), tenure.LeaseConfig{})
		attempt := time.Now()
		term := testkit.MustAcquire(t, lease)
		require.Equal(t, 29*time.Second, term.Deadline().Sub(attempt), "after an acquire")
		attempt = time.Now()
		require.NoError(t, lease.Renew(t.Context(), term))
		require.Equal(t, 29*time.Second, term.Deadline().Sub(attempt), "after a renewal")
	})
}

func TestAnAnswerThatComesAfterTheTermIsOverIsRefused(t *testing.T) {
	inBubbles(t, func(t *scene) {
		store := storetest.Faulty(t.store, testkit.AnswerAfter(29*time.Second))
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		term, err := lease.TryAcquire(t.Context())
		require.Nil(t, term)
		require.ErrorIs(t, err, tenure.ErrDeadline)
		store.SetHook(nil)
		term = testkit.MustAcquire(t, lease) // what it left behind is no obstacle

		time.Sleep(28 * time.Second)
		store.SetHook(testkit.AnswerAfter(time.Second))
		require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrDeadline)
		require.False(t, term.Valid(), "a term that was over came back")
	})
}

func TestALeaseExpiresByTheTTLOfItsHolder(t *testing.T) {
	inBubbles(t, func(t *scene) {
		for _, ttl := range []struct{ holder, thief time.Duration }{{time.Minute, 6 * time.Second}, {6 * time.Second, time.Minute}} {
			testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{TTL: ttl.holder}))
			thief := testkit.NewLease(t, t.store, tenure.LeaseConfig{TTL: ttl.thief})
			_, err := thief.Read(t.Context()) // from here on it counts the silence
			require.NoError(t, err)
			time.Sleep(ttl.holder - time.Millisecond)
			_, err = thief.StealExpired(t.Context())
			require.ErrorIs(t, err, tenure.ErrHeld)
			time.Sleep(2 * time.Millisecond)
			_, err = thief.StealExpired(t.Context())
			require.NoError(t, err)
			testkit.RemoveRecord(t, t.store)
		}
	})
}

func TestARecordNeverHasLessThanItsHoldersTTL(t *testing.T) {
	inBubbles(t, func(t *scene) {
		const ttl = 10*time.Millisecond + time.Microsecond
		lease := testkit.NewLease(t, t.store, tenure.LeaseConfig{TTL: ttl})
		testkit.MustAcquire(t, lease)
		got, err := lease.Read(t.Context())
		require.NoError(t, err)
		require.GreaterOrEqual(t, got.TTL, ttl)
	})
}

// Only Mem's clock can be set wrong: SQLite's is the clock of the process.
func TestARecordStampedInTheFutureExpiresOnceItHasStoodStill(t *testing.T) {
	inBubble(t, func(t *scene) {
		ahead := 24 * time.Hour
		store := storetest.NewMem()
		store.Now = func() time.Time { return time.Now().Add(ahead) }
		testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{}))
		ahead = 0
		standby := testkit.NewLease(t, store, tenure.LeaseConfig{})
		t.wantHeld(standby)
		t.wantTakeoverAfter(30*time.Second, standby)
	})
}

// As above.
func TestObservedExpiryIgnoresTheStoresClock(t *testing.T) {
	inBubble(t, func(t *scene) {
		ahead := time.Duration(0)
		store := storetest.NewMem()
		store.Now = func() time.Time { return time.Now().Add(ahead) }
		holder := testkit.NewLease(t, store, tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, holder)
		standby := testkit.NewLease(t, store, tenure.LeaseConfig{Expiry: tenure.ExpiryObserved})
		for _, ahead = range []time.Duration{time.Hour, -time.Hour, 72 * time.Hour} {
			for range 5 {
				t.wantHeld(standby)
				time.Sleep(10 * time.Second)
				require.NoError(t, holder.Renew(t.Context(), term))
			}
		}
		t.wantHeld(standby)
		t.wantTakeoverAfter(30*time.Second, standby)
	})
}

func TestAPayloadThatCannotBeDecodedExpiresAndIsLoggedOnce(t *testing.T) {
	inBubbles(t, func(t *scene) {
		for _, payload := range []string{"", "not JSON", `[]`, `{"holder": 7}`, `"x"`, "\xff\x00"} {
			putRecord(t, t.store, payload)
			var log bytes.Buffer
			lease := testkit.NewLease(t, t.store, tenure.LeaseConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
			got, err := lease.Read(t.Context())
			require.NoError(t, err)
			require.Equal(t, "unknown", got.Holder, payload)
			require.Equal(t, 30*time.Second, got.TTL, payload)
			t.wantTakeoverAfter(30*time.Second, lease)
			synctest.Wait()
			require.Equal(t, 1, strings.Count(log.String(), "cannot be decoded"), "%q: %s", payload, &log)
		}
	})
}

func TestAnIncompleteRecordIsReadWithDefaults(t *testing.T) {
	inBubbles(t, func(t *scene) {
		for payload, want := range map[string]tenure.Holding{
			`{}`:                                {Holder: "unknown", TTL: 30 * time.Second},
			`null`:                              {Holder: "unknown", TTL: 30 * time.Second},
			`{"holder":"a","acquired_at_ms":5}`: {Holder: "a", TTL: 30 * time.Second, AcquiredAt: time.UnixMilli(5)},
			`{"holder":"a","term":"t","ttl_ms":1500,"shoe_size":44}`: {Holder: "a", Term: "t", TTL: 1500 * time.Millisecond},
			`{"holder":"a","ttl_ms":0}`:                              {Holder: "a", TTL: 30 * time.Second},
			`{"holder":"a","ttl_ms":-1}`:                             {Holder: "a", TTL: 30 * time.Second},
			`{"holder":"a","ttl_ms":9223372036854775807}`:            {Holder: "a", TTL: 30 * time.Second},
		} {
			putRecord(t, t.store, payload)
			got, err := testkit.NewLease(t, t.store, tenure.LeaseConfig{}).Read(t.Context())
			require.NoError(t, err)
			require.True(t, got.Holder == want.Holder && got.Term == want.Term && got.TTL == want.TTL && got.AcquiredAt.Equal(want.AcquiredAt),
				"%s: got %+v, want %+v", payload, got, want)
		}
	})
}

func TestAnotherProgramsRecordExpiresOnlyOnceItHasStoodStill(t *testing.T) {
	inBubbles(t, func(t *scene) {
		putRecord(t, t.store, `{"holder":"x","acquired_at_ms":1}`)
		time.Sleep(time.Hour) // its age, by a clock that we don't know
		lease := testkit.NewLease(t, t.store, tenure.LeaseConfig{})
		t.wantHeld(lease)
		t.wantTakeoverAfter(30*time.Second, lease)
	})
}

func TestARecordStandsStillFromTheAnswerThatFirstShowedIt(t *testing.T) {
	inBubbles(t, func(t *scene) {
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{}))
		store := storetest.Faulty(t.store, testkit.Slowly(10*time.Second))
		standby := testkit.NewLease(t, store, tenure.LeaseConfig{Expiry: tenure.ExpiryObserved})
		t.wantHeld(standby) // answered after 20 s: a create, and a read
		store.SetHook(nil)
		t.wantTakeoverAfter(30*time.Second, standby)
	})
}

func TestALostAnswerToARenewalOrAReleaseCostsNothing(t *testing.T) {
	inBubbles(t, func(t *scene) {
		ctx, store := t.Context(), storetest.Faulty(t.store, nil)
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, lease)
		token := term.Token()
		loses := func(op string, call func(context.Context, *tenure.Term) error) {
			t.Helper()
			store.SetHook(testkit.Only(op, testkit.LoseAnswer))
			require.ErrorIs(t, call(ctx, term), testkit.ErrReset)
			store.SetHook(nil)
		}
		loses("put", lease.Renew)
		time.Sleep(20 * time.Second)
		require.NoError(t, lease.Renew(ctx, term))
		require.Equal(t, 29*time.Second, term.Remaining())
		require.Equal(t, token, term.Token())

		loses("put", lease.Renew)
		require.NoError(t, lease.Release(ctx, term))
		_, err := lease.Read(ctx)
		require.ErrorIs(t, err, tenure.ErrNotFound)

		term = testkit.MustAcquire(t, lease)
		loses("delete", lease.Release)
		require.NoError(t, lease.Release(ctx, term))
	})
}

func TestAnAcquireWhoseAnswerWasLostSucceedsAtTheNextTry(t *testing.T) {
	for name, try := range acquires {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				store := storetest.Faulty(t.store, testkit.Only("put", testkit.Once(testkit.LoseAnswer)))
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
				_, err := try(lease, t.Context())
				require.ErrorIs(t, err, testkit.ErrReset)
				t.wantHeld(testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "another"}))
				term, err := try(lease, t.Context())
				require.NoError(t, err)
				require.NoError(t, lease.Renew(t.Context(), term))
			})
		})
	}
}

func TestATermThatCouldNotBeReleasedIsReleasedByTheNextAcquire(t *testing.T) {
	for name, try := range acquires {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				ctx, store := t.Context(), storetest.Faulty(t.store, nil)
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
				first := testkit.MustAcquire(t, lease)
				store.SetHook(testkit.Only("delete", testkit.Refuse))
				require.ErrorContains(t, lease.Release(ctx, first), "refused")
				_, err := try(lease, ctx)
				require.ErrorContains(t, err, "refused")
				t.wantHeld(testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "another"}))
				store.SetHook(nil)
				second, err := try(lease, ctx)
				require.NoError(t, err)
				require.Greater(t, second.Token(), first.Token())
				require.ErrorIs(t, lease.Renew(ctx, first), tenure.ErrLost)
				require.NoError(t, lease.Renew(ctx, second))
			})
		})
	}
}

func TestOfConcurrentRenewalsTheLatestCounts(t *testing.T) {
	inBubbles(t, func(t *scene) {
		store := storetest.Faulty(t.store, nil)
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		term := testkit.MustAcquire(t, lease)
		store.SetHook(testkit.AnswerAfter(3 * time.Second))
		earlier := make(chan error)
		go func() { earlier <- lease.Renew(t.Context(), term) }()
		time.Sleep(time.Second)
		store.SetHook(nil)
		require.NoError(t, lease.Renew(t.Context(), term))
		deadline := term.Deadline()
		require.NoError(t, <-earlier)
		require.Equal(t, deadline, term.Deadline())

		var renewals sync.WaitGroup
		for range 8 {
			renewals.Go(func() {
				for range 100 {
					if err := lease.Renew(t.Context(), term); err != nil && !errors.Is(err, tenure.ErrConflict) {
						t.Error(err)
					}
				}
			})
		}
		renewals.Wait()
	})
}

// The lease finds a record of its own that no crash has left behind: it must neither read it as
// another's nor take it back.
func TestAnAcquireUnderWayIsNotDisturbed(t *testing.T) {
	inBubbles(t, func(t *scene) {
		store := storetest.Faulty(t.store, testkit.Only("put", testkit.Once(testkit.AnswerAfter(time.Second))))
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: true})
		acquired := make(chan error)
		go func() {
			_, err := lease.TryAcquire(t.Context())
			acquired <- err
		}()
		synctest.Wait()
		_, err := lease.Read(t.Context())
		require.NoError(t, err)
		t.wantHeld(lease)
		require.NoError(t, <-acquired)
	})
}

func TestAHolderThatIsUniqueWithinSomethingTakesOnlyWhatItHasLeftThere(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease := func(where string) *tenure.Lease {
			cfg := tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: true}
			if where != "" {
				cfg.Labels = map[string]string{tenure.UniqueWithin: where}
			}
			record.Restart()
			return testkit.NewLease(t, t.store, cfg)
		}
		_, err := lease("here").TryAcquire(t.Context())
		require.NoError(t, err)
		for _, where := range []string{"there", ""} {
			_, err = lease(where).AcquireOrSteal(t.Context())
			require.ErrorIs(t, err, tenure.ErrHeld, where)
		}
		_, err = lease("here").AcquireOrSteal(t.Context())
		require.NoError(t, err)
	})
}

// A machine is restored from a snapshot while the original keeps running. Each of the two
// renews the same term's record as the other left it.
func TestATermEndsWhenACopyOfItsProcessRenewsIt(t *testing.T) {
	type call = func(*tenure.Lease, context.Context, *tenure.Term) error
	requestAndRenew := func(lease *tenure.Lease, ctx context.Context, term *tenure.Term) error {
		return errors.Join(lease.RequestRelease(ctx), lease.Renew(ctx, term))
	}
	for name, test := range map[string]struct {
		call      call
		loseFirst bool // lose the answer to a renewal, which may excuse the next one
	}{
		"at its renewal":                      {(*tenure.Lease).Renew, false},
		"at its release":                      {(*tenure.Lease).Release, false},
		"at the renewal that finds a request": {requestAndRenew, false},
		"at the renewal after the next":       {(*tenure.Lease).Renew, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				ctx, store := t.Context(), storetest.Faulty(t.store, nil)
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
				term := testkit.MustAcquire(t, lease)
				require.NoError(t, lease.Renew(ctx, term))
				if test.loseFirst {
					store.SetHook(testkit.Only("put", testkit.Once(testkit.LoseAnswer)))
					require.ErrorIs(t, lease.Renew(ctx, term), testkit.ErrReset)
					renewAsCopy(t, t.store)
					require.NoError(t, lease.Renew(ctx, term))
				}
				renewAsCopy(t, t.store)
				err := test.call(lease, ctx, term)
				require.ErrorIs(t, err, tenure.ErrLost)
				require.False(t, term.Valid())
				require.ErrorContains(t, err, "copy")
				got, err := lease.Read(ctx)
				require.NoError(t, err)
				require.Equal(t, term.ID(), got.Term, "the record of the copy")
			})
		})
	}
}

func TestARequestIsNotTakenForARenewalByACopy(t *testing.T) {
	inBubbles(t, func(t *scene) {
		ctx := t.Context()
		lease, other := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
		term := testkit.MustAcquire(t, lease)
		for _, to := range []string{"", "b", "c"} {
			require.NoError(t, other.RequestHandover(ctx, to))
			require.NoError(t, other.RequestHandover(ctx, to+"'"))
			require.NoError(t, lease.Renew(ctx, term))
		}
	})
}

func TestATermIsLostWithItsRecord(t *testing.T) {
	inBubbles(t, func(t *scene) {
		ctx := t.Context()
		a, b := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
		for _, to := range []string{"", "b"} {
			stale := testkit.MustAcquire(t, a)
			testkit.RemoveRecord(t, t.store)
			if to == "b" {
				testkit.MustAcquire(t, b)
			}
			testkit.WantLost(t, a.Renew(ctx, stale), stale, to)
			require.ErrorIs(t, a.Release(ctx, stale), tenure.ErrLost)
		}
		got, err := a.Read(ctx)
		require.NoError(t, err)
		require.Equal(t, "b", got.Holder, "after the stale renewal and release")
	})
}

func TestTokensIncreaseOverEveryKindOfTakeover(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease := testkit.NewLease(t, t.store, tenure.LeaseConfig{TTL: 10 * time.Millisecond})
		var last int64
		next := func(how string) *tenure.Term {
			t.Helper()
			term := testkit.MustAcquire(t, lease)
			require.Greater(t, term.Token(), last, how)
			last = term.Token()
			return term
		}
		for range 20 {
			term := next("first, or after a deletion")
			require.NoError(t, lease.Renew(t.Context(), term))
			require.NoError(t, lease.Release(t.Context(), term))
			next("after a release")
			_, err := lease.Read(t.Context())
			require.NoError(t, err)
			time.Sleep(11 * time.Millisecond)
			next("after an expiry")
			testkit.RemoveRecord(t, t.store)
		}
	})
}

func TestALeaseRefusesAConfigOrATermThatItCannotWorkWith(t *testing.T) {
	_, err := tenure.NewLease(nil, tenure.LeaseConfig{Key: testkit.LeaseKey})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	store := storetest.NewMem()
	for name, test := range map[string]struct {
		cfg  tenure.LeaseConfig
		says []string
	}{
		"empty id":     {tenure.LeaseConfig{Key: tenure.Key{Type: "x"}}, []string{"empty id"}},
		"negative TTL": {tenure.LeaseConfig{TTL: -time.Second}, []string{"TTL -1s"}},
		"tiny TTL":     {tenure.LeaseConfig{TTL: time.Millisecond}, []string{"TTL 1ms"}},
		"Margin":       {tenure.LeaseConfig{TTL: time.Second, Margin: time.Second}, []string{"Margin 1s"}},
		"expiry":       {tenure.LeaseConfig{Expiry: 7}, []string{"Expiry 7"}},
		"label":        {tenure.LeaseConfig{Labels: map[string]string{"tenure.release": ""}}, []string{"tenure.release"}},
		"no holder":    {tenure.LeaseConfig{AssumeUniqueHolder: true}, []string{"AssumeUniqueHolder", "Holder"}},
		"all at once": {tenure.LeaseConfig{Key: tenure.Key{Type: "x"}, TTL: time.Second, Margin: -1, Holder: "a\x00", Expiry: 7},
			[]string{"empty id", "Margin -1ns", "holder", "Expiry 7"}},
	} {
		_, err := tenure.NewLease(store, test.cfg)
		require.ErrorIs(t, err, tenure.ErrInvalid, name)
		for _, says := range test.says {
			require.ErrorContains(t, err, says, name)
		}
	}

	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	other := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "other", ID: "lease"}}))
	for _, term := range []*tenure.Term{nil, other} {
		require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrInvalid)
		require.ErrorIs(t, lease.Release(t.Context(), term), tenure.ErrInvalid)
	}
}

// wrongClock is a database whose clock is wrong, by a different amount at each read.
type wrongClock struct{ tenure.Store }

func wrong() time.Duration { return rand.N(48*time.Hour) - 24*time.Hour }

func (s wrongClock) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Store.Get(ctx, key)
	obj.Age += wrong()
	return obj, err
}

func TestWithObservedExpiryNoClockDecides(t *testing.T) {
	const interval, missed, takeovers = 2 * time.Second, 5, 100
	const ttl, acquireInterval = missed * interval, missed * interval / 6
	inBubble(t, func(t *scene) {
		var mu sync.Mutex         // guards the variables below
		var offset time.Duration  // of the database's clock
		var writer *replica       // of the record
		var first, last time.Time // write of the writer
		mem := storetest.NewMem()
		mem.Now = func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			return time.Now().Add(offset)
		}
		t.store = wrongClock{mem}
		watch := func(r *replica) {
			r.store.SetHook(testkit.Only("put", func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
				err := do(ctx)
				mu.Lock()
				defer mu.Unlock()
				if err == nil && writer != r { // a takeover
					writer, first = r, time.Now()
				}
				if err == nil {
					last = time.Now()
				}
				return err
			}))
		}
		for _, name := range []string{"a", "b", "c"} {
			watch(t.startWith(tenure.LeaseConfig{TTL: ttl, Expiry: tenure.ExpiryObserved, Holder: name}, tenure.CoordinatorConfig{RenewInterval: interval}))
		}
		for range takeovers {
			time.Sleep(ttl + acquireInterval + rand.N(10*time.Second))
			i := slices.IndexFunc(t.replicas, func(r *replica) bool { return r.IsHolder() })
			require.NotEqual(t, -1, i, "no replica holds:\n%v", t.jobs)
			holder := t.replicas[i]
			holder.store.SetHook(testkit.Hang)
			mu.Lock()
			renewed := last
			mu.Unlock()
			for end := time.Now().Add(ttl + acquireInterval); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				mu.Lock()
				offset = wrong()
				mu.Unlock()
			}
			synctest.Wait()
			mu.Lock()
			next, after := writer, first.Sub(renewed)
			mu.Unlock()
			require.NotSame(t, holder, next, "not taken over")
			require.GreaterOrEqual(t, after, ttl, "from the last renewal to the takeover")
			require.LessOrEqual(t, after, ttl+acquireInterval, "from the last renewal to the takeover")
			watch(holder)
		}
	})
}

// nameless is a store that keeps no names.
type nameless struct{ *storetest.Mem }

func (nameless) Traits() tenure.Traits { return tenure.Traits{Clockless: true, Nameless: true} }

func (s nameless) Fence(guard tenure.Guard) (tenure.Store, error) {
	fenced, err := s.Mem.Fence(guard)
	if err != nil {
		return nil, err
	}
	return nameless{fenced.(*storetest.Mem)}, nil
}

func (s nameless) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	if err := obj.Validate(); err == nil && obj.Name != "" {
		return tenure.Object{}, fmt.Errorf("put %s: %w: the store keeps no names", obj.Key, errors.ErrUnsupported)
	}
	return s.Mem.PutIf(ctx, obj, cond)
}

func TestALeaseInAStoreWithoutNamesHasNone(t *testing.T) {
	store := storetest.Faulty(nameless{newEvents()}, nil) // it passes on that there are none
	cfg := tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}, Holder: "a"}
	lease, err := tenure.NewLease(store, cfg)
	require.NoError(t, err)
	require.Empty(t, lease.Config().Name)
	for range 2 {
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		require.NoError(t, lease.Renew(t.Context(), term))
		require.NoError(t, lease.Release(t.Context(), term))
	}

	// An offer is a write of its own.
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.RequestHandover(t.Context(), "b"))
	require.NoError(t, lease.Renew(t.Context(), term))
	require.NoError(t, lease.Release(t.Context(), term))

	cfg.Name = "the sweeper's"
	_, err = tenure.NewLease(store, cfg)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, `"the sweeper's"`)
}

func TestAStoreWithoutNamesKeepsTheContract(t *testing.T) {
	storetest.Run(t, func(*testing.T) tenure.Store { return nameless{newEvents()} })
}

// The replica was cut off and has recovered; its job returned long ago.
func TestNoReplicaFencesItself(t *testing.T) {
	for name, test := range map[string]struct {
		act  func(t *scene, b *replica)
		want []string
	}{
		"shutdown": {func(_ *scene, b *replica) { b.stop() }, []string{"a works"}},
		"handover": {func(t *scene, b *replica) { require.NoError(t, b.lease.RequestHandover(t.Context(), "a")) }, []string{"a works"}},
		"crash":    {func(_ *scene, b *replica) { b.store.SetHook(testkit.Hang) }, []string{"a fences b at ", "a works"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a, b := t.start("a", t.fencing(testkit.Succeeds)), t.start("b", t.fencing(testkit.UntilDone))
				time.Sleep(time.Minute)
				a.store.SetHook(testkit.Hang)
				time.Sleep(40 * time.Second) // b has it, and cannot fence a
				a.store.SetHook(nil)
				time.Sleep(20 * time.Second)
				test.act(t, b)
				time.Sleep(time.Minute)
				require.Equal(t, append([]string{"a works", "b fences a at "}, test.want...), t.said())
			})
		})
	}
}

func TestAReplicaThatWasAloneFencesNobodyAfterAnOutage(t *testing.T) {
	for _, unique := range []bool{false, true} {
		t.Run(fmt.Sprint("AssumeUniqueHolder ", unique), func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a := t.startWith(tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: unique}, t.fencing(testkit.Succeeds))
				time.Sleep(time.Minute)
				a.store.SetHook(testkit.Refuse)
				time.Sleep(90 * time.Second)
				a.store.SetHook(nil)
				time.Sleep(time.Minute)
				require.Equal(t, []string{"a works", "a works"}, t.said())
			})
		})
	}
}

func TestOfTwoPredecessorsWithOneNameBothAreFenced(t *testing.T) {
	inBubble(t, func(t *scene) {
		addr := func(a string) map[string]string { return map[string]string{"addr": a} }
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "x", Labels: addr("1")}))
		b := t.startWith(tenure.LeaseConfig{Holder: "x", Labels: addr("2")}, t.fencing(testkit.UntilDone))
		time.Sleep(45 * time.Second)
		b.store.SetHook(testkit.Hang)
		t.start("c", t.fencing(testkit.Succeeds))
		time.Sleep(time.Minute)
		require.Equal(t, []string{"x fences x at 1", "c fences x at 1", "c fences x at 2", "c works"}, t.said())
	})
}

// Once b works, its successor has to fence only b, even if b has not renewed since.
func TestAPredecessorThatWasFencedIsNotFencedAgain(t *testing.T) {
	for _, until := range []time.Duration{31 * time.Second, time.Minute} {
		inBubble(t, func(t *scene) {
			testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
			b := t.start("b", t.fencing(testkit.Succeeds))
			time.Sleep(until)
			require.Equal(t, []string{"b fences a at ", "b works"}, t.said())
			b.store.SetHook(testkit.Hang)
			t.start("c", t.fencing(testkit.Succeeds))
			time.Sleep(time.Minute)
			require.Equal(t, []string{"c fences b at ", "c works"}, t.said()[2:])
		})
	}
}

func TestFencePredecessorMayChangeTheLabelsThatItIsGiven(t *testing.T) {
	inBubble(t, func(t *scene) {
		testkit.MustAcquire(t, testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"addr": "1"}}))
		cfg := t.fencing(testkit.Succeeds)
		cfg.FencePredecessor = func(ctx context.Context, prev tenure.Holding) error {
			for ctx.Err() == nil {
				prev.Labels["addr"] += "!"
				time.Sleep(time.Second)
			}
			return ctx.Err()
		}
		b := t.start("b", cfg)
		time.Sleep(time.Minute)
		b.stop()
		t.start("c", t.fencing(testkit.Succeeds))
		time.Sleep(time.Second)
		require.Equal(t, []string{"c fences a at 1", "c works"}, t.said())
	})
}

// It offers the lease to any replica, which is no reason to come back itself.
func TestAReplicaThatResignsBeforeItHasConfirmedStaysAway(t *testing.T) {
	inBubble(t, func(t *scene) {
		_, b := t.takeover(t.fencing(testkit.UntilDone))
		require.NoError(t, b.Resign(t.Context()))
		for range 10 {
			time.Sleep(10 * time.Millisecond)
			require.NoError(t, b.store.Wake(t.Context(), testkit.LeaseKey))
		}
		require.Equal(t, tenure.RoleStandby, b.Status().Role)
		require.Equal(t, 1, b.Status().Terms)
	})
}

func TestATermMayBeReleasedTwiceAtOnce(t *testing.T) {
	lease := testkit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{})
	term := testkit.MustAcquire(t, lease)
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() { lease.Release(t.Context(), term) })
	}
	all.Wait()
}

func TestAHolderThatLosesItsTermToAnOfferKnowsThatNobodyHolds(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		time.Sleep(time.Second)
		putRecord(t, t.store, `{"holder":"gone","acquired_at_ms":1,"term":"an offer","ttl_ms":30000,"offered":true}`)
		require.NoError(t, a.store.Wake(t.Context(), testkit.LeaseKey))
		time.Sleep(29 * time.Second)
		got := a.Status()
		require.Empty(t, got.Holder)
		require.Len(t, got.Recent, 1)
		require.NotEqual(t, "an offer", got.Recent[0].ID)
	})
}

// lossyNetwork delays, loses and reorders requests and answers, until it is repaired.
type lossyNetwork struct {
	mu     sync.Mutex
	rng    *rand.Rand
	mended atomic.Bool
	late   sync.WaitGroup // what is still under way
}

// draw returns a number below n.
func (l *lossyNetwork) draw(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rng.IntN(n)
}

func (l *lossyNetwork) ms(most int) time.Duration {
	return time.Duration(l.draw(most)) * time.Millisecond
}

func (l *lossyNetwork) hook(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
	if l.mended.Load() {
		return do(ctx)
	}
	request, back := l.ms(40), l.ms(40)
	if l.draw(4) == 0 {
		request = 0
	}
	if l.draw(6) == 0 {
		request += 200 * time.Millisecond // lands after its caller has given up
	}
	loseRequest, loseAnswer := l.draw(6) == 0, l.draw(4) == 0
	answer := make(chan error, 1)
	l.late.Go(func() {
		time.Sleep(request)
		if loseRequest {
			return
		}
		err := do(context.WithoutCancel(ctx))
		time.Sleep(back)
		if !loseAnswer {
			answer <- err
		}
	})
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Over a lossy network, many renewals of one term at once, and requests for its release, are
// not taken for a copy's. Once the network is repaired and a renewal has been answered, a
// copy's renewal is never taken for the term's own.
func TestATermKnowsItsOwnRenewalsFromThoseOfACopy(t *testing.T) {
	testkit.Slow(t)
	for seed := range uint64(300) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, func(t *scene) {
				network := &lossyNetwork{rng: rand.New(rand.NewPCG(seed, 1))}
				store := storetest.Faulty(t.store, nil)
				lease := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", TTL: time.Hour})
				term := testkit.MustAcquire(t, lease)
				store.SetHook(network.hook)
				defer network.late.Wait()
				var all sync.WaitGroup
				for range 1 + network.draw(4) {
					all.Go(func() {
						for range 12 {
							ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond+network.ms(90))
							err := lease.Renew(ctx, term)
							cancel()
							if errors.Is(err, tenure.ErrLost) {
								t.Errorf("lost: %v", err)
								return
							}
							time.Sleep(network.ms(30))
						}
					})
				}
				other := testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
				all.Go(func() {
					for i := range 8 {
						time.Sleep(network.ms(120))
						_ = other.RequestHandover(t.Context(), []string{"", "x", "y"}[i%3])
					}
				})
				all.Wait()
				if network.draw(2) == 0 {
					network.late.Wait()
				}
				network.mended.Store(true)
				require.NoError(t, lease.Renew(t.Context(), term))
				if network.draw(2) == 0 {
					network.late.Wait()
				}
				renewAsCopy(t, t.store)
				require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrLost, "a copy's renewal was taken for its own")
			})
		})
	}
}

// A program makes a second lease by mistake. It must not take the first one's record for what a crash has left.
func TestASecondLeaseWithTheUniqueHolderOfThisProcessStandsBy(t *testing.T) {
	unique := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
	t.Run("its job does not run beside the first one's", func(t *testing.T) {
		inBubbles(t, func(t *scene) {
			var running, most atomic.Int32
			cfg := tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error {
				most.Store(max(most.Load(), running.Add(1)))
				defer running.Add(-1)
				return testkit.UntilDone(ctx)
			}}
			a, b := t.startWith(unique, cfg), t.startWith(unique, cfg)
			time.Sleep(5 * time.Minute)
			t.wantHolder(a)
			a.stop()
			time.Sleep(time.Minute)
			t.wantHolder(b)
			require.EqualValues(t, 1, most.Load(), "jobs that ran at once")
		})
	})
	t.Run("if the first one does not release the lease, it waits for the TTL", func(t *testing.T) {
		inBubbles(t, func(t *scene) {
			testkit.MustAcquire(t, testkit.NewLease(t, t.store, unique))
			second := testkit.NewLease(t, t.store, unique)
			t.wantHeld(second)
			time.Sleep(tenure.DefaultTTL + time.Millisecond)
			testkit.MustAcquire(t, second)
		})
	})
	t.Run("through another store", func(t *testing.T) {
		testkit.EachStore(t, func(t *testing.T, open func() tenure.Store) {
			a, b := testkit.NewLease(t, open(), unique), testkit.NewLease(t, open(), unique)
			term := testkit.MustAcquire(t, a)
			_, err := b.AcquireOrSteal(t.Context())
			require.ErrorIs(t, err, tenure.ErrHeld)
			require.NoError(t, a.Release(t.Context(), term))
			testkit.MustAcquire(t, b)
		})
	})
}
