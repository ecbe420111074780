package claims_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

// startDrainable starts a process with a Drain.
func (w *world) startDrainable(name string, cfg claims.SessionConfig) (*process, *tenure.Drain) {
	cfg.Drain = testkit.Must(tenure.NewDrain(w.store, name, testkit.Quiet))
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- cfg.Drain.Run(ctx) }()
	p := w.startWith(name, cfg)
	w.Cleanup(func() { cancel(); <-ran })
	synctest.Wait()
	return p, cfg.Drain
}

func (w *world) drain(name string) {
	w.Helper()
	require.NoError(w, tenure.SetDrain(w.Context(), w.store, tenure.Drained{Replica: name, Left: 24 * time.Hour}))
	time.Sleep(20 * time.Millisecond)
}

func TestADrainedReplicaGivesBackWhatItHasClaimed(t *testing.T) {
	inBubble(t, func(w *world) {
		a, drain := w.startDrainable("a", claims.SessionConfig{})
		b := w.start("b")
		worked, idle, detached := a.claimOne("worked"), a.claimOne("idle"), a.claimOne("detached")
		require.NoError(w, a.keys.Detach(detached))
		causes := make(chan error, 1)
		go func() {
			_ = a.keys.Do(context.Background(), worked, func(ctx context.Context) error {
				<-ctx.Done()
				causes <- context.Cause(ctx)
				time.Sleep(time.Second)
				return nil
			})
		}()
		synctest.Wait()
		session := a.session.ID()
		w.drain("a")
		cause := <-causes
		require.ErrorIs(w, cause, tenure.ErrResigned)
		require.ErrorIs(w, cause, objects.ErrDrained)
		require.False(w, a.keys.Holds(idle))
		require.Len(w, b.claim("worked", "idle", "detached"), 1, "a func runs for one, another process uses another")
		began := time.Now()
		require.NoError(w, drain.Start(w.Context()))
		require.InDelta(w, time.Second, time.Since(began), float64(100*time.Millisecond))
		b.claimOne("worked")
		require.Equal(w, session, a.session.ID(), "the session goes on, for the claim that is detached")
		require.NoError(w, claims.ReleaseDetached(w.Context(), w.store, detached))
		drain.Stop()

		_, err := a.keys.TryClaim(w.Context(), "free")
		require.ErrorIs(w, err, objects.ErrDrained, "the mark stands")
		require.ErrorIs(w, err, tenure.ErrResigned)
		got := make(chan []claims.Claim, 1)
		go func() {
			c, _ := a.keys.Claim(context.Background(), "free")
			got <- c
		}()
		time.Sleep(time.Hour)
		require.Empty(w, got)
		require.NoError(w, tenure.ClearDrain(w.Context(), w.store, "a"))
		began = time.Now()
		require.Len(w, <-got, 1)
		require.Less(w, time.Since(began), 20*time.Millisecond)
	})
}

// The statement was sent before the replica was drained.
func TestWhatIsTakenWhileAReplicaIsDrainedIsFreedAtOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		a, drain := w.startDrainable("a", claims.SessionConfig{})
		a.fault(testkit.Only("claims.take", testkit.AnswerAfter(time.Second)))
		got := make(chan []claims.Claim, 1)
		go func() {
			c, err := a.keys.TryClaim(context.Background(), "one")
			if err != nil {
				w.Error(err)
			}
			got <- c
		}()
		synctest.Wait()
		require.NoError(w, drain.Start(w.Context()))
		require.Empty(w, <-got)
		synctest.Wait()
		w.start("b").claimOne("one")
	})
}

func TestADrainedReplicaAsksForTheReleaseOfClaimsWithoutAFunc(t *testing.T) {
	inBubble(t, func(w *world) {
		asked := make(chan claims.Claim, 10)
		a, drain := w.startDrainable("a", claims.SessionConfig{ReleaseRequested: func(c claims.Claim) { asked <- c }})
		c := a.claimOne("one")
		started := make(chan error, 1)
		go func() { started <- drain.Start(context.Background()) }()
		require.Equal(w, c, <-asked)
		time.Sleep(time.Minute)
		require.Empty(w, started)
		require.Empty(w, asked, "once")
		require.NoError(w, a.keys.Release(w.Context(), c))
		require.NoError(w, <-started)
	})
}

// A func that begins for a claim of a drained replica is told at once.
func TestAFuncOfADrainedReplicaIsToldAsItBegins(t *testing.T) {
	inBubble(t, func(w *world) {
		a, drain := w.startDrainable("a", claims.SessionConfig{ReleaseRequested: func(claims.Claim) {}})
		c := a.claimOne("one")
		go func() { _ = drain.Start(context.Background()) }()
		synctest.Wait()
		require.ErrorIs(w, a.keys.Do(w.Context(), c, func(ctx context.Context) error { return context.Cause(ctx) }), objects.ErrDrained)
		synctest.Wait()
		w.start("b").claimOne("one")
	})
}

func TestASessionOfADrainedReplicaTakesNothingWhenItStarts(t *testing.T) {
	inBubble(t, func(w *world) {
		require.NoError(w, tenure.SetDrain(w.Context(), w.store, tenure.Drained{Replica: "a", Left: time.Hour}))
		drain := testkit.Must(tenure.NewDrain(w.store, "a", testkit.Quiet))
		a := w.startWith("a", claims.SessionConfig{Drain: drain})
		got := make(chan []claims.Claim, 1)
		go func() {
			c, _ := a.keys.TryClaim(context.Background(), "one")
			got <- c
		}()
		time.Sleep(time.Minute) // Run of the Drain begins late
		require.Empty(w, got)
		ctx, cancel := context.WithCancel(context.Background())
		ran := make(chan error, 1)
		go func() { ran <- drain.Run(ctx) }()
		defer func() { cancel(); <-ran }()
		require.Empty(w, <-got)
	})
}

// starting calls Start in a goroutine.
func starting(drain *tenure.Drain) chan error {
	started := make(chan error, 1)
	go func() { started <- drain.Start(context.Background()) }()
	return started
}

func TestStartWaitsForAStatementThatIsUnderWay(t *testing.T) {
	inBubble(t, func(w *world) {
		a, drain := w.startDrainable("a", claims.SessionConfig{})
		a.fault(testkit.Only("claims.take", testkit.AnswerAfter(3*time.Second)))
		go func() { _, _ = a.keys.TryClaim(context.Background(), "one") }()
		synctest.Wait()
		began := time.Now()
		require.NoError(w, drain.Start(w.Context()))
		require.GreaterOrEqual(w, time.Since(began), 3*time.Second)
		w.start("b").claimOne("one")
	})
}

func TestStartEndsWhenTheReplicaTakesPartAgain(t *testing.T) {
	inBubble(t, func(w *world) {
		a, drain := w.startDrainable("a", claims.SessionConfig{})
		returned := a.work(a.claimOne("one"), time.Minute)
		synctest.Wait()
		started := starting(drain)
		synctest.Wait()
		drain.Stop()
		require.ErrorContains(w, <-started, "takes part again")
		<-returned
	})
}

// Otherwise the drain would wait for a func that has ended its claim and goes on, and has not been told.
func TestAFuncWhoseClaimHasEndedIsToldToo(t *testing.T) {
	inRowsBubble(t, effect, 1, func(w *rowsWorld) {
		a, drain := w.startDrainable("a", claims.SessionConfig{})
		rows := w.rowsOf(a, effect)
		got := takeOf(w, rows, 1)
		go func() {
			_ = rows.Do(context.Background(), got[0], func(ctx context.Context) error {
				_ = rows.Finish(ctx, got...)
				<-ctx.Done()
				return nil
			})
		}()
		synctest.Wait()
		began := time.Now()
		require.NoError(w, drain.Start(w.Context()))
		require.Less(w, time.Since(began), time.Second)
	})
}

// Without a column for the time, the session keeps a row whose func has failed until the next attempt is due.
func TestADrainedReplicaKeepsNoRowForItsBackoff(t *testing.T) {
	cfg := effect
	cfg.NotBefore, cfg.Done, cfg.Backoff = "", "", func(claims.Claim) time.Duration { return time.Hour }
	for name, failed := range map[string]bool{"before": true, "while it is drained": false} {
		t.Run(name, func(t *testing.T) {
			inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
				a, drain := w.startDrainable("a", claims.SessionConfig{})
				ctx, cancel := context.WithCancel(context.Background())
				served := make(chan error, 1)
				rows := w.rowsOf(a, cfg)
				go func() {
					served <- rows.Serve(ctx, 1, func(ctx context.Context, _ claims.Claim) error {
						if !failed {
							<-ctx.Done()
							return nil // without finishing its row
						}
						return errors.New("it fails")
					})
				}()
				time.Sleep(time.Second)
				began := time.Now()
				require.NoError(w, drain.Start(w.Context()))
				require.Less(w, time.Since(began), time.Second)
				require.Empty(w, w.owned(a.session.ID()))
				cancel()
				require.NoError(w, <-served)
			})
		})
	}
}

// A request of the operator is no request of another process.
func TestAfterADrainAClaimWasNotRequested(t *testing.T) {
	inBubble(t, func(w *world) {
		asked := make(chan claims.Claim, 10)
		a, drain := w.startDrainable("a", claims.SessionConfig{ReleaseRequested: func(c claims.Claim) { asked <- c }})
		c := a.claimOne("one")
		started := starting(drain)
		require.Equal(w, c, <-asked)
		drain.Stop()
		<-started
		require.NoError(w, w.start("b").keys.RequestRelease(w.Context(), "one"))
		require.Equal(w, c, <-asked)
		c = a.claimOne("two")
		require.NoError(w, a.keys.Do(w.Context(), c, func(ctx context.Context) error { return context.Cause(ctx) }))
	})
}
