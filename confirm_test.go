package tenure_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

func TestAfterATakeoverTheJobBeginsOnceItIsConfirmedAndThePredecessorFenced(t *testing.T) {
	inBubble(t, func(t *scene) {
		cfg := t.fencing(kit.Succeeds)
		cfg.Confirmations = 2
		_, b := t.takeover(cfg)
		b.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			t.say(call.Op)
			return do(ctx)
		})
		time.Sleep(19 * time.Second)
		got := b.Status()
		require.Equal(t, tenure.RoleConfirming, got.Role)
		require.NotZero(t, got.Token)
		require.NotZero(t, got.TrustLeft)
		require.False(t, b.IsHolder())
		require.Equal(t, []string{"put"}, t.said())
		time.Sleep(2 * time.Second)
		require.Equal(t, tenure.RoleHolder, b.Status().Role)
		t.wantHolder(b)
		require.Equal(t, []string{"put", "put", "b fences a at ", "put", "b works"}, t.said()) // the third drops a from the record
	})
}

func TestWithoutATakeoverThereIsNothingToConfirm(t *testing.T) {
	inBubble(t, func(t *scene) {
		cfg := t.fencing(kit.Succeeds)
		cfg.Confirmations = 3
		a := t.start("a", cfg)
		t.wantHolder(a)
		b := t.start("b", cfg)
		time.Sleep(time.Minute)
		a.stop()
		synctest.Wait()
		t.wantHolder(b)
		require.Equal(t, []string{"a works", "b works"}, t.said())
	})
}

func TestAPredecessorIsFencedUntilThatSucceeds(t *testing.T) {
	inBubble(t, func(t *scene) {
		tries := 0
		_, b := t.takeover(t.fencing(func(context.Context) error {
			if tries++; tries < 5 {
				return errors.New("the power switch does not answer")
			}
			return nil
		}))
		require.Equal(t, tenure.RoleConfirming, b.Status().Role)
		require.Contains(t, b.Status().LastError, "power switch")
		time.Sleep(15 * time.Second)
		t.wantHolder(b)
		require.Equal(t, 5, tries)
	})
}

// Hints make a holder renew; otherwise they could confirm a takeover at once.
func TestHintsConfirmNothing(t *testing.T) {
	inBubble(t, func(t *scene) {
		_, b := t.takeover(tenure.CoordinatorConfig{Confirmations: 2})
		for range 19 {
			require.NoError(t, b.store.Wake(t.Context(), kit.LeaseKey))
			time.Sleep(time.Second)
		}
		t.wantHolder(nil) // two renewals take 20 s
		time.Sleep(2 * time.Second)
		t.wantHolder(b)
	})
}

func TestATermThatEndsBeforeItIsConfirmedRunsNoJob(t *testing.T) {
	for name, end := range map[string]struct {
		act   func(t *scene, b *replica)
		cause error
		until time.Duration // the job is told to return
	}{
		"shutdown": {func(_ *scene, b *replica) { go b.stop() }, tenure.ErrShutdown, 0},
		"resigned": {func(t *scene, b *replica) { go b.Resign(t.Context()) }, tenure.ErrResigned, 0},
		"deadline": {func(_ *scene, b *replica) { b.store.SetHook(kit.Refuse) }, tenure.ErrDeadline, 20 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				cause := make(chan error, 1)
				_, b := t.takeover(t.fencing(func(ctx context.Context) error {
					<-ctx.Done()
					time.Sleep(3 * time.Second) // as a job may
					cause <- context.Cause(ctx)
					return nil
				}))
				end.act(t, b)
				time.Sleep(end.until + 2*time.Second)
				b.store.SetHook(nil)
				_, err := b.lease.Read(t.Context())
				require.NoError(t, err, "the lease stands while the predecessor is being fenced")
				time.Sleep(2 * time.Second)
				require.ErrorIs(t, <-cause, end.cause)
				require.Equal(t, []string{"b fences a at "}, t.said())
			})
		})
	}
}

func TestAPanicWhileFencingGivesTheLeaseBackAndPanicsOutOfRun(t *testing.T) {
	inBubble(t, func(t *scene) {
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
		time.Sleep(30 * time.Second)
		lease := kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "b"})
		c, err := tenure.NewCoordinator(lease, t.fencing(func(context.Context) error { panic("boom") }))
		require.NoError(t, err)
		defer func() {
			p, ok := recover().(*tenure.JobPanic)
			require.True(t, ok)
			require.Equal(t, "boom", p.Value)
			holding, err := lease.Read(context.Background())
			require.NoError(t, err)
			require.Equal(t, "", holding.Holder+holding.OfferedTo, "any replica may take it")
			require.Equal(t, []string{"b fences a at "}, t.said())
		}()
		c.Run(t.Context())
	})
}

// A predecessor that a term did not fence is fenced in the next one, however the term ends.
func TestAPredecessorThatWasNotFencedIsFencedInTheNextTerm(t *testing.T) {
	type act = func(t *scene, b *replica)
	crash := func(_ *scene, b *replica) { b.store.SetHook(kit.Hang) }
	for name, test := range map[string]struct {
		act  act
		next tenure.LeaseConfig
		want []string // from then on
	}{
		"shutdown":         {func(_ *scene, b *replica) { b.stop() }, tenure.LeaseConfig{}, nil},
		"resigned":         {func(t *scene, b *replica) { b.Resign(t.Context()) }, tenure.LeaseConfig{}, nil},
		"asked to release": {func(t *scene, b *replica) { b.lease.RequestRelease(t.Context()) }, tenure.LeaseConfig{}, nil},
		"asked for c":      {func(t *scene, b *replica) { b.lease.RequestHandover(t.Context(), "c") }, tenure.LeaseConfig{}, nil},
		"release refused": {func(t *scene, b *replica) { // and as it has resigned, it is not back before c
			b.store.SetHook(kit.Refuse)
			go b.Resign(t.Context())
			time.Sleep(10 * time.Second)
			b.store.SetHook(nil)
		}, tenure.LeaseConfig{}, nil},
		"crash": {crash, tenure.LeaseConfig{}, []string{"c fences a at 10.0.0.1", "c fences b at 10.0.0.2", "c works"}},
		"crash and restart": {crash, tenure.LeaseConfig{Holder: "b", AssumeUniqueHolder: true},
			[]string{"b fences a at 10.0.0.1", "b works"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				if test.want == nil {
					test.want = []string{"c fences a at 10.0.0.1", "c works"}
				}
				addr := func(a string) map[string]string { return map[string]string{"addr": a} }
				kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a", Labels: addr("10.0.0.1")}))
				var tries atomic.Int32
				b := t.startWith(tenure.LeaseConfig{Holder: "b", Labels: addr("10.0.0.2")}, t.fencing(func(ctx context.Context) error {
					if tries.Add(1) > 1 {
						return nil
					}
					return kit.UntilDone(ctx)
				}))
				time.Sleep(45 * time.Second) // and a renewal
				require.Equal(t, []string{"b fences a at 10.0.0.1"}, t.said())
				if test.next.AssumeUniqueHolder { // the next b finds the first one gone
					test.act(t, b)
					t.startWith(test.next, t.fencing(kit.Succeeds))
				} else {
					t.start("c", t.fencing(kit.Succeeds))
					test.act(t, b)
				}
				time.Sleep(time.Minute)
				require.Equal(t, test.want, t.said()[1:])
			})
		})
	}
}

func TestATakeoverWhoseAnswerWasLostIsConfirmed(t *testing.T) {
	inBubble(t, func(t *scene) {
		kit.MustAcquire(t, kit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}))
		b := t.start("b", t.fencing(kit.Succeeds))
		lost := false
		b.store.SetHook(kit.Only("put", func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if err == nil && !lost {
				lost, err = true, kit.ErrReset
			}
			return err
		}))
		time.Sleep(time.Minute)
		require.Equal(t, []string{"b fences a at ", "b works"}, t.said())
	})
}

func TestAReplicaMayReclaimTheLeaseOfItsEarlierLife(t *testing.T) {
	inBubble(t, func(t *scene) {
		unique := tenure.LeaseConfig{Holder: "pod-0", AssumeUniqueHolder: true}
		term := kit.MustAcquire(t, kit.NewLease(t, t.store, unique))
		for _, other := range []tenure.LeaseConfig{{Holder: "pod-1", AssumeUniqueHolder: true}, {Holder: "pod-0"}} {
			_, err := kit.NewLease(t, t.store, other).AcquireOrSteal(t.Context())
			require.ErrorIs(t, err, tenure.ErrHeld)
		}
		restarted := kit.NewLease(t, t.store, unique)
		require.Greater(t, kit.MustAcquire(t, restarted).Token(), term.Token())
		_, err := restarted.AcquireOrSteal(t.Context())
		require.ErrorIs(t, err, tenure.ErrHeld) // its own term, of this life

		cfg := t.fencing(kit.Succeeds) // but it does not fence itself, nor wait
		cfg.Confirmations = 2
		t.startWith(unique, cfg)
		require.Equal(t, []string{"pod-0 works"}, t.said())
	})
}
