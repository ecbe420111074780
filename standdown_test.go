package tenure_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

func TestAReplicaThatStandsDownDoesNotCompeteUntilItIsAskedTo(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		require.NoError(t, a.StandDown(t.Context()))
		t.settle()
		t.wantHolder(b)
		b.stop()
		time.Sleep(10 * time.Hour)
		t.wantHolder(nil)
		status := a.Status()
		require.True(t, status.StandsDown)
		require.Equal(t, 1, status.Terms, "it has not taken the lease in between either")
		require.Equal(t, tenure.RoleStandby, status.Role)
		require.Empty(t, status.Holder, "it still sees who holds the lease")
		a.Compete()
		t.settle()
		t.wantHolder(a)
		require.False(t, a.Status().StandsDown)
		require.NoError(t, a.StandDown(t.Context()))
		a.stop()
		require.Empty(t, t.jobs.Holder())
	})
}

func TestAStandbyAndAReplicaThatDoesNotRunCanStandDown(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		require.NoError(t, b.StandDown(t.Context()))
		require.NoError(t, b.StandDown(t.Context()))
		a.stop()
		time.Sleep(time.Hour)
		t.wantHolder(nil)

		c, err := tenure.NewCoordinator(b.lease, tenure.CoordinatorConfig{})
		require.NoError(t, err)
		require.NoError(t, c.StandDown(t.Context()))
		kit.RunCoordinator(t.T, t.run, c)
		time.Sleep(time.Hour)
		require.False(t, c.IsHolder())
		c.Compete()
		t.settle()
		require.True(t, c.IsHolder())
		require.NoError(t, c.StandDown(t.Context()))
		require.False(t, c.IsHolder())
	})
}

func TestAHandoverByNameAsksAReplicaThatStandsDown(t *testing.T) {
	inBubble(t, func(t *scene) {
		a, b := t.start("a"), t.start("b")
		require.NoError(t, b.StandDown(t.Context()))
		time.Sleep(time.Hour)
		t.request(a, b)
		synctest.Wait()
		t.wantHolder(b)
		require.False(t, b.Status().StandsDown)
	})
}

// No other replica took the lease that was once offered to it.
func TestAnOldOfferAsksNoReplicaThatStandsDown(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		b := t.begin(tenure.LeaseConfig{Holder: "b"}, tenure.CoordinatorConfig{})
		b.stop()
		t.request(a, b)
		synctest.Wait()
		a.stop()
		time.Sleep(24 * time.Hour)
		c, err := tenure.NewCoordinator(b.lease, tenure.CoordinatorConfig{})
		require.NoError(t, err)
		require.NoError(t, c.StandDown(t.Context()))
		kit.RunCoordinator(t.T, t.run, c)
		time.Sleep(time.Hour)
		require.False(t, c.IsHolder())
		require.True(t, c.Status().StandsDown)
	})
}

// A replica that is told to stand down while its predecessor is fenced begins no job either.
func TestNoJobBeginsAfterAReplicaWasToldToStandDownWhileItFenced(t *testing.T) {
	for range 40 {
		inBubble(t, func(t *scene) {
			var b *replica
			begun := make(chan struct{})
			a := t.start("a")
			a.store.SetHook(kit.Refuse)
			b = t.begin(tenure.LeaseConfig{Holder: "b"}, tenure.CoordinatorConfig{
				FencePredecessor: func(context.Context, tenure.Holding) error {
					<-begun
					go b.StandDown(context.Background())
					for !b.Status().StandsDown {
						runtime.Gosched()
					}
					return nil
				},
				Reconcile: func(context.Context) error { t.Error("the job begins"); return nil },
			})
			close(begun)
			time.Sleep(5 * time.Minute)
			require.Equal(t, 1, b.Status().Terms)
			require.False(t, b.IsHolder())
		})
	}
}

// The attempt is under way when the replica stands down.
func TestNoJobBeginsAfterAReplicaWasToldToStandDown(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.begin(tenure.LeaseConfig{Holder: "a"}, tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { t.Error("the job begins"); return nil },
		})
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "put" {
				time.Sleep(time.Second)
			}
			return err
		})
		time.Sleep(time.Second / 2)
		require.NoError(t, a.StandDown(t.Context()))
		time.Sleep(time.Minute)
		t.wantHolder(nil)
		b := t.start("b")
		t.wantHolder(b)
	})
}

// It may be told to do so between the answer to its attempt and the start of its term.
func TestATermOfAReplicaThatStandsDownEndsBeforeItsJobBegins(t *testing.T) {
	inBubble(t, func(t *scene) {
		a := t.start("a")
		lease := a.lease
		a.stop()
		term, err := lease.TryAcquire(t.Context())
		require.NoError(t, err)
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { t.Error("the job begins"); return nil },
		})
		require.NoError(t, err)
		require.NoError(t, c.StandDown(t.Context()))
		require.ErrorIs(t, c.Hold(t.Context(), term), tenure.ErrResigned)
		require.False(t, term.Valid())
	})
}

func TestStandingDownIsInTheStatusAsJSON(t *testing.T) {
	data, err := json.Marshal(tenure.Status{StandsDown: true})
	require.NoError(t, err)
	require.Contains(t, string(data), `"stands_down":true`)
	data, err = json.Marshal(tenure.Status{})
	require.NoError(t, err)
	require.NotContains(t, string(data), "stands_down")
}

func TestRenewalsAreLoggedOnceAMinuteIfThatIsSet(t *testing.T) {
	for name, logs := range map[string]bool{"set": true, "not set": false} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				var log bytes.Buffer
				a := t.start("a", tenure.CoordinatorConfig{LogRenewals: logs, Logger: slog.New(slog.NewTextHandler(&log, nil))})
				time.Sleep(time.Hour)
				a.stop()
				lines := 0
				for line := range strings.Lines(log.String()) {
					if strings.Contains(line, `msg="lease renewed"`) {
						require.Contains(t, line, "level=INFO")
						require.Contains(t, line, " replica_id=a ")
						lines++
					}
				}
				if !logs {
					require.Zero(t, lines)
					return
				}
				require.LessOrEqual(t, lines, 60)
				require.GreaterOrEqual(t, lines, 50)
			})
		})
	}
}

// No code of the user's runs between a renewal and its deadline.
func TestALogThatBlocksDelaysNoRenewal(t *testing.T) {
	inBubble(t, func(t *scene) {
		blocks := make(chan struct{})
		a := t.start("a", tenure.CoordinatorConfig{LogRenewals: true, Logger: slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
			if bytes.Contains(p, []byte("lease renewed")) {
				<-blocks
			}
			return len(p), nil
		}), nil))})
		time.Sleep(10 * time.Hour)
		t.wantHolder(a)
		require.Equal(t, 1, a.Status().Terms)
		close(blocks)
	})
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }
