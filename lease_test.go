package tenure_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

func TestALeaseIsAcquiredRenewedReadAndReleased(t *testing.T) {
	inBubbles(t, func(t *scene) {
		ctx := t.Context()
		a := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a", Labels: map[string]string{"addr": "10.0.0.1"}})
		began := time.Now()
		term, err := a.TryAcquire(ctx)
		require.NoError(t, err)
		require.Equal(t, 29*time.Second, term.Deadline().Sub(began), "a TTL of 30s less a Margin of 1s")
		time.Sleep(20 * time.Second)
		require.NoError(t, a.Renew(ctx, term))
		require.Equal(t, 29*time.Second, term.Remaining())

		got, err := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"}).Read(ctx)
		require.NoError(t, err)
		require.True(t, got.AcquiredAt.Equal(began) && got.RenewedAt.Equal(began.Add(20*time.Second)), "%+v", got)
		want := tenure.Holding{Key: kit.LeaseKey, Holder: "a", Term: term.ID(), TTL: 30 * time.Second, Labels: map[string]string{"addr": "10.0.0.1"},
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
		b := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
		_, err := b.StealExpired(t.Context())
		require.ErrorIs(t, err, tenure.ErrNotFound)
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
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
		a := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"})
		kit.MustAcquire(t, a)
		time.Sleep(time.Hour)
		b := kit.NewLease(t, storetest.Faulty(t.store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
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
		lease := kit.NewLease(t, storetest.Faulty(t.store, kit.AnswerAfter(5*time.Second)), tenure.LeaseConfig{})
		attempt := time.Now()
		term := kit.MustAcquire(t, lease)
		require.Equal(t, 29*time.Second, term.Deadline().Sub(attempt), "after an acquire")
		attempt = time.Now()
		require.NoError(t, lease.Renew(t.Context(), term))
		require.Equal(t, 29*time.Second, term.Deadline().Sub(attempt), "after a renewal")
	})
}

func TestAnAnswerThatComesAfterTheTermIsOverIsRefused(t *testing.T) {
	inBubbles(t, func(t *scene) {
		store := storetest.Faulty(t.store, kit.AnswerAfter(29*time.Second))
		lease := kit.NewLease(t, store, tenure.LeaseConfig{})
		term, err := lease.TryAcquire(t.Context())
		require.Nil(t, term)
		require.ErrorIs(t, err, tenure.ErrDeadline)
		store.SetHook(nil)
		term = kit.MustAcquire(t, lease) // what it left behind is no obstacle

		time.Sleep(28 * time.Second)
		store.SetHook(kit.AnswerAfter(time.Second))
		require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrDeadline)
		require.False(t, term.Valid(), "a term that was over came back")
	})
}

func TestALeaseExpiresByTheTTLOfItsHolder(t *testing.T) {
	inBubbles(t, func(t *scene) {
		for _, ttl := range []struct{ holder, thief time.Duration }{{time.Minute, 6 * time.Second}, {6 * time.Second, time.Minute}} {
			kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{TTL: ttl.holder}))
			thief := kit.NewLease(t, t.store, tenure.LeaseConfig{TTL: ttl.thief})
			_, err := thief.Read(t.Context()) // from here on it counts the silence
			require.NoError(t, err)
			time.Sleep(ttl.holder - time.Millisecond)
			_, err = thief.StealExpired(t.Context())
			require.ErrorIs(t, err, tenure.ErrHeld)
			time.Sleep(2 * time.Millisecond)
			_, err = thief.StealExpired(t.Context())
			require.NoError(t, err)
			kit.RemoveRecord(t, t.store)
		}
	})
}

func TestARecordNeverHasLessThanItsHoldersTTL(t *testing.T) {
	inBubbles(t, func(t *scene) {
		const ttl = 10*time.Millisecond + time.Microsecond
		lease := kit.NewLease(t, t.store, tenure.LeaseConfig{TTL: ttl})
		kit.MustAcquire(t, lease)
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
		kit.MustAcquire(t, kit.NewLease(t, store, tenure.LeaseConfig{}))
		ahead = 0
		standby := kit.NewLease(t, store, tenure.LeaseConfig{})
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
		holder := kit.NewLease(t, store, tenure.LeaseConfig{})
		term := kit.MustAcquire(t, holder)
		standby := kit.NewLease(t, store, tenure.LeaseConfig{Expiry: tenure.Observed})
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
			lease := kit.NewLease(t, t.store, tenure.LeaseConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))})
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
			got, err := kit.NewLease(t, t.store, tenure.LeaseConfig{}).Read(t.Context())
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
		lease := kit.NewLease(t, t.store, tenure.LeaseConfig{})
		t.wantHeld(lease)
		t.wantTakeoverAfter(30*time.Second, lease)
	})
}

func TestARecordStandsStillFromTheAnswerThatFirstShowedIt(t *testing.T) {
	inBubbles(t, func(t *scene) {
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{}))
		store := storetest.Faulty(t.store, kit.Slowly(10*time.Second))
		standby := kit.NewLease(t, store, tenure.LeaseConfig{Expiry: tenure.Observed})
		t.wantHeld(standby) // answered after 20 s: a create, and a read
		store.SetHook(nil)
		t.wantTakeoverAfter(30*time.Second, standby)
	})
}

func TestALostAnswerToARenewalOrAReleaseCostsNothing(t *testing.T) {
	inBubbles(t, func(t *scene) {
		ctx, store := t.Context(), storetest.Faulty(t.store, nil)
		lease := kit.NewLease(t, store, tenure.LeaseConfig{})
		term := kit.MustAcquire(t, lease)
		token := term.Token()
		loses := func(op string, call func(context.Context, *tenure.Term) error) {
			t.Helper()
			store.SetHook(kit.Only(op, kit.LoseAnswer))
			require.ErrorIs(t, call(ctx, term), kit.ErrReset)
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

		term = kit.MustAcquire(t, lease)
		loses("delete", lease.Release)
		require.NoError(t, lease.Release(ctx, term))
	})
}

func TestAnAcquireWhoseAnswerWasLostSucceedsAtTheNextTry(t *testing.T) {
	for name, try := range acquires {
		t.Run(name, func(t *testing.T) {
			inBubbles(t, func(t *scene) {
				store := storetest.Faulty(t.store, kit.Only("put", kit.Once(kit.LoseAnswer)))
				lease := kit.NewLease(t, store, tenure.LeaseConfig{})
				_, err := try(lease, t.Context())
				require.ErrorIs(t, err, kit.ErrReset)
				t.wantHeld(kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "another"}))
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
				lease := kit.NewLease(t, store, tenure.LeaseConfig{})
				first := kit.MustAcquire(t, lease)
				store.SetHook(kit.Only("delete", kit.Refuse))
				require.ErrorContains(t, lease.Release(ctx, first), "refused")
				_, err := try(lease, ctx)
				require.ErrorContains(t, err, "refused")
				t.wantHeld(kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "another"}))
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
		lease := kit.NewLease(t, store, tenure.LeaseConfig{})
		term := kit.MustAcquire(t, lease)
		store.SetHook(kit.AnswerAfter(3 * time.Second))
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
		store := storetest.Faulty(t.store, kit.Only("put", kit.Once(kit.AnswerAfter(time.Second))))
		lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "a", AssumeUniqueHolder: true})
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
			return kit.NewLease(t, t.store, cfg)
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
				lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
				term := kit.MustAcquire(t, lease)
				require.NoError(t, lease.Renew(ctx, term))
				if test.loseFirst {
					store.SetHook(kit.Only("put", kit.Once(kit.LoseAnswer)))
					require.ErrorIs(t, lease.Renew(ctx, term), kit.ErrReset)
					renewAsCopy(t, t.store)
					require.NoError(t, lease.Renew(ctx, term))
				}
				renewAsCopy(t, t.store)
				err := test.call(lease, ctx, term)
				kit.WantLost(t, err, term, "a")
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
		lease, other := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
		term := kit.MustAcquire(t, lease)
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
		a, b := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
		for _, to := range []string{"", "b"} {
			stale := kit.MustAcquire(t, a)
			kit.RemoveRecord(t, t.store)
			if to == "b" {
				kit.MustAcquire(t, b)
			}
			kit.WantLost(t, a.Renew(ctx, stale), stale, to)
			require.ErrorIs(t, a.Release(ctx, stale), tenure.ErrLost)
		}
		got, err := a.Read(ctx)
		require.NoError(t, err)
		require.Equal(t, "b", got.Holder, "after the stale renewal and release")
	})
}

func TestTokensIncreaseOverEveryKindOfTakeover(t *testing.T) {
	inBubbles(t, func(t *scene) {
		lease := kit.NewLease(t, t.store, tenure.LeaseConfig{TTL: 10 * time.Millisecond})
		var last int64
		next := func(how string) *tenure.Term {
			t.Helper()
			term := kit.MustAcquire(t, lease)
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
			kit.RemoveRecord(t, t.store)
		}
	})
}

func TestALeaseRefusesAConfigOrATermThatItCannotWorkWith(t *testing.T) {
	_, err := tenure.NewLease(nil, tenure.LeaseConfig{Key: kit.LeaseKey})
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

	lease := kit.NewLease(t, store, tenure.LeaseConfig{})
	other := kit.MustAcquire(t, kit.NewLease(t, store, tenure.LeaseConfig{Key: tenure.Key{Type: "other", ID: "lease"}}))
	for _, term := range []*tenure.Term{nil, other} {
		require.ErrorIs(t, lease.Renew(t.Context(), term), tenure.ErrInvalid)
		require.ErrorIs(t, lease.Release(t.Context(), term), tenure.ErrInvalid)
	}
}
