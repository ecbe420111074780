package tenure_test

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// traceOf returns a trace whose funcs all call do.
func traceOf(do func(what string)) *tenure.Trace {
	return &tenure.Trace{
		Attempt:       func(time.Duration, error) { do("attempt") },
		Acquired:      func(*tenure.Term, *tenure.Holding) { do("acquired") },
		Renewed:       func(*tenure.Term, time.Duration, time.Duration) { do("renewed") },
		RenewalFailed: func(*tenure.Term, error, time.Duration) { do("renewal failed") },
		Lost:          func(*tenure.Term, error) { do("lost") },
		Released:      func(*tenure.Term, error) { do("released") },
		JobStarted:    func(*tenure.Term) { do("job started") },
		JobEnded:      func(*tenure.Term, error, time.Duration) { do("job ended") },
		JobStuck:      func(*tenure.Term, time.Duration) { do("job stuck") },
		JobRun:        func(tenure.JobRun) { do("run") },
	}
}

// callbackLog is a handler that calls a func for each record.
type callbackLog func(slog.Record)

func (callbackLog) Enabled(context.Context, slog.Level) bool        { return true }
func (h callbackLog) WithAttrs([]slog.Attr) slog.Handler            { return h }
func (h callbackLog) WithGroup(string) slog.Handler                 { return h }
func (h callbackLog) Handle(_ context.Context, r slog.Record) error { h(r); return nil }

// blocked is a config of a replica whose log and trace block from the first line on, like a
// pipe without a reader, until the test ends.
func (t *scene) blocked() tenure.CoordinatorConfig {
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	return tenure.CoordinatorConfig{
		Logger: slog.New(kit.BlockedLog(release)),
		Trace:  traceOf(func(string) { <-release }),
	}
}

func TestALogAndATraceThatBlockDelayNeitherTheEndOfAJobNorTheNextTerm(t *testing.T) {
	inBubbles(t, func(t *scene) {
		a, b := t.start("a", t.blocked()), t.start("b", t.blocked())
		time.Sleep(time.Minute + time.Second)
		t.wantHolder(a)
		a.store.SetHook(kit.Hang)
		time.Sleep(19*time.Second + time.Millisecond) // the renew deadline
		synctest.Wait()
		require.Equal(t, tenure.RoleStopping, a.Status().Role)
		time.Sleep(16 * time.Second) // the rest of the TTL, and one AcquireInterval
		synctest.Wait()
		t.wantHolder(b) // the ledger would fail the test if jobs overlapped
		a.store.SetHook(nil)
		b.stop()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		t.wantHolder(a)
	})
}

func TestALogAndATraceThatBlockDelayNoRenewalAndNoRunOfTheJob(t *testing.T) {
	inBubbles(t, func(t *scene) {
		cfg := t.blocked()
		cfg.Reconcile = tenure.Every(time.Minute, func(context.Context) error { return errors.New("refused") })
		a := t.start("a", cfg)
		for range 100 {
			time.Sleep(time.Minute)
			require.True(t, a.IsHolder())
		}
		synctest.Wait()
		require.Equal(t, 101, a.only(t).Failed)
	})
}

func TestACheckWhoseErrorBlocksDelaysNoEndOfAJob(t *testing.T) {
	for name, texts := range map[string]int{"at once": 0, "when it is asked for again": 1} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				release := make(chan struct{})
				defer close(release)
				var sick atomic.Bool
				a := t.start("a", tenure.CoordinatorConfig{Check: func(context.Context, tenure.Role) error {
					if !sick.Load() {
						return nil
					}
					err := &blockingError{release: release}
					err.texts.Store(int64(texts))
					return err
				}})
				b := t.start("b", tenure.CoordinatorConfig{})
				sick.Store(true)
				time.Sleep(16 * time.Second) // less than the renew deadline
				synctest.Wait()
				require.Equal(t, tenure.RoleStandby, a.Status().Role)
				t.wantHolder(b)
			})
		})
	}
}

// blockingError is an error whose text can be read a number of times; after that, reading it
// blocks.
type blockingError struct {
	texts   atomic.Int64
	release chan struct{}
}

func (e *blockingError) Error() string {
	if e.texts.Add(-1) < 0 {
		<-e.release
	}
	return "at last"
}

func TestAPanicOfTheLogOrTheTraceEndsTheTermInOrder(t *testing.T) {
	run := func(t *testing.T, what string, panics tenure.CoordinatorConfig) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			store := storetest.Faulty(storetest.NewMem(), nil)
			panics.Reconcile = tenure.Every(5*time.Second, func(ctx context.Context) error {
				select {
				case <-ctx.Done():
					time.Sleep(8 * time.Second) // which Run waits for
				case <-time.After(time.Second):
				}
				return nil
			})
			if what == "renewal failed" || what == "lost" {
				time.AfterFunc(15*time.Second, func() { store.SetHook(kit.Only("put", kit.Refuse)) })
			}
			lease := kit.NewLease(t, store, tenure.LeaseConfig{Holder: "a"})
			c, err := tenure.NewCoordinator(lease, panics)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Second)
			defer cancel()
			func() {
				defer func() {
					var p *tenure.JobPanic
					require.ErrorAs(t, recover().(error), &p)
					require.Equal(t, "broken", p.Value)
					require.Contains(t, p.Error(), "the logger or the trace panicked: broken")
				}()
				_ = c.Run(ctx)
			}()
			if !slices.Contains([]string{"released", "job ended"}, what) {
				require.NoError(t, ctx.Err(), "the panic was what ended Run")
			}
			require.False(t, c.IsHolder())
			store.SetHook(nil)
			_, err = lease.Read(t.Context())
			kit.WantErr(t, err, tenure.ErrNotFound) // it is released
			calls := 0
			store.SetHook(func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
				calls++
				return do(ctx)
			})
			time.Sleep(10 * time.Minute)
			require.Zero(t, calls, "nothing renews")
			store.SetHook(nil)
			ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			panics.Trace, panics.Logger = nil, kit.Quiet
			c, err = tenure.NewCoordinator(lease, panics)
			require.NoError(t, err)
			require.NoError(t, c.Run(ctx))
		})
	}
	for _, what := range []string{"attempt", "acquired", "renewed", "renewal failed", "lost", "released", "job started", "job ended", "run"} {
		t.Run("trace "+what, func(t *testing.T) {
			run(t, what, tenure.CoordinatorConfig{Trace: traceOf(func(now string) {
				if now == what {
					panic("broken")
				}
			})})
		})
	}
	for _, line := range []string{"lease acquired", "lease renewed", "lease released"} {
		t.Run("log "+line, func(t *testing.T) {
			run(t, strings.TrimPrefix(line, "lease "), tenure.CoordinatorConfig{Logger: slog.New(callbackLog(func(r slog.Record) {
				if r.Message == line {
					panic("broken")
				}
			}))})
		})
	}
}

func TestATraceThatEndsItsGoroutineEndsNoTerm(t *testing.T) {
	inBubble(t, func(t *scene) {
		var told atomic.Int64
		a := t.start("a", tenure.CoordinatorConfig{Trace: traceOf(func(string) { told.Add(1); runtime.Goexit() })})
		time.Sleep(time.Hour)
		t.wantHolder(a)
		require.Greater(t, told.Load(), int64(1))
	})
}

func TestAPanicOfTheJobIsPassedOnAlthoughTheTracePanicsToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lease := kit.NewLease(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"})
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { panic("the job") },
			Trace:     &tenure.Trace{JobEnded: func(*tenure.Term, error, time.Duration) { panic("the trace") }},
		})
		require.NoError(t, err)
		defer func() { require.Equal(t, "the job", recover().(*tenure.JobPanic).Value) }()
		_ = c.Run(t.Context())
	})
}
