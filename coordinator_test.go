package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

// ledger records when jobs begin and end, and fails the test if two overlap.
type ledger struct {
	t     *testing.T
	began time.Time

	mu      sync.Mutex
	running string
	lines   []string
}

func newLedger(t *testing.T) *ledger { return &ledger{t: t, began: time.Now()} }

func (l *ledger) say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%v ", time.Since(l.began).Round(time.Millisecond))+fmt.Sprintf(format, args...))
}

// run is a job that ends when it is told to.
func (l *ledger) run(ctx context.Context, name string) {
	l.begin(name)
	<-ctx.Done()
	l.end(name, context.Cause(ctx))
}

func (l *ledger) begin(name string) {
	l.say("%s begins", name)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running != "" {
		l.t.Errorf("%s's job began while %s's was running", name, l.running)
	}
	l.running = name
}

func (l *ledger) end(name string, why error) {
	l.mu.Lock()
	l.running = ""
	l.mu.Unlock()
	l.say("%s ends: %v", name, why)
}

// holder returns whose job runs.
func (l *ledger) holder() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.running
}

func (l *ledger) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// replica is a coordinator that runs, with a store that can be made to fail for
// it alone.
type replica struct {
	*tenure.Coordinator
	lease *tenure.Lease
	store *storetest.FaultyStore
	stop  func() // and wait until Run has returned
}

// start runs a replica until the test ends. Its job writes to the ledger, unless
// cfg brings one of its own.
func start(t *testing.T, l *ledger, store tenure.Store, name string, cfg tenure.CoordinatorConfig) *replica {
	t.Helper()
	if cfg.Watch == nil && cfg.Reconcile == nil {
		cfg.Reconcile = func(ctx context.Context) error { l.run(ctx, name); return nil }
	}
	return startWith(t, store, tenure.LeaseConfig{Holder: name}, cfg)
}

func startWith(t *testing.T, store tenure.Store, leaseConfig tenure.LeaseConfig, cfg tenure.CoordinatorConfig) *replica {
	t.Helper()
	if pollOnly {
		store = struct{ tenure.Store }{store}
	}
	faulty := storetest.Faulty(store, nil)
	lease := newLease(t, faulty, leaseConfig)
	c, err := tenure.NewCoordinator(lease, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	returned := make(chan error, 1)
	go func() { returned <- c.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-returned; err != nil {
			t.Errorf("Run of %s: %v", leaseConfig.Holder, err)
		}
	})
	t.Cleanup(stop)
	return &replica{c, lease, faulty, stop}
}

// pollOnly makes stores give no hints.
var pollOnly bool

// settle returns when a lease that was given back has been taken: at once where a
// standby is woken, else within its AcquireInterval.
func settle() {
	if pollOnly {
		time.Sleep(5 * time.Second)
	}
	synctest.Wait()
}

func TestAllThatHoldsWithWakeUpsHoldsByPolling(t *testing.T) {
	pollOnly = true
	defer func() { pollOnly = false }()
	for name, test := range map[string]func(*testing.T){
		"one holds":          TestOneReplicaHoldsAndTheOthersStandBy,
		"release":            TestAReleasedLeaseIsTakenAtOnce,
		"vanished holder":    TestAVanishedHolderIsReplacedWithinTenMillisecondsOfItsTTL,
		"stop, then release": TestTheLeaseIsReleasedOnlyAfterTheJobHasReturned,
		"failing renewals":   TestRenewalsThatFailForAWhileCostNothing,
		"hanging renewal":    TestARenewalThatHangsEndsTheJobAtTheRenewDeadline,
		"job that ends":      TestAJobThatEndsGivesTheLeaseToAnotherReplica,
		"lost lease":         TestAReplicaThatLostTheLeaseCompetesAgain,
		"stolen lease":       TestAStolenLeaseEndsTheJobAtTheNextRenewal,
		"stuck job":          TestAJobThatIgnoresItsContextIsReportedAndKeepsItsReplicaFromCompeting,
		"resignation":        TestResignHandsTheLeaseToAnotherReplica,
		"interrupted":        TestAShutdownDuringAnAcquireLeavesNoRecord,
		"resigned twice":     TestAReplicaThatWasAskedToResignWhileItStoppedStaysAwayAllTheSame,
		"asked to release":   TestAHolderThatIsAskedHandsTheLeaseOver,
		"named replica":      TestTheReplicaThatIsNamedIsNext,
		"many faults":        TestManyReplicasUnderFaultsNeverOverlap,
	} {
		t.Run(name, test)
	}
}

// hang makes every call wait until its context ends: the store is unreachable.
func hang(ctx context.Context, _ storetest.Call, _ func(context.Context) error) error {
	<-ctx.Done()
	return ctx.Err()
}

func refuse(context.Context, storetest.Call, func(context.Context) error) error {
	return errors.New("connection refused")
}

func TestOneReplicaHoldsAndTheOthersStandBy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		for range 100 {
			time.Sleep(7 * time.Second)
			if !a.IsHolder() || b.IsHolder() || l.holder() != "a" {
				t.Fatalf("a holds: %v, b holds: %v, runs: %q", a.IsHolder(), b.IsHolder(), l.holder())
			}
		}
		got := b.Status()
		if got.Role != tenure.RoleStandby || got.Holder != "a" || got.Token != 0 || got.TrustLeft != 0 {
			t.Errorf("standby's status: %+v", got)
		}
		got = a.Status()
		if got.Role != tenure.RoleHolder || got.Holder != "a" || got.Token == 0 || got.TrustLeft < 19*time.Second || got.Terms != 1 {
			t.Errorf("holder's status: %+v", got)
		}
	})
}

func TestAReleasedLeaseIsTakenAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		a.stop()
		if a.IsHolder() || l.holder() == "a" {
			t.Error("a's job outlasts Run")
		}
		settle()
		if !b.IsHolder() || l.holder() != "b" {
			t.Errorf("b does not hold after a's release:\n%v", l)
		}
	})
}

func TestAVanishedHolderIsReplacedWithinTenMillisecondsOfItsTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute + time.Second) // the last renewal was a second ago
		a.store.SetHook(hang)
		time.Sleep(29*time.Second + 10*time.Millisecond)
		if !b.IsHolder() || l.holder() != "b" {
			t.Errorf("b does not hold:\n%v", l)
		}
		if a.IsHolder() {
			t.Error("a believes to hold")
		}
	})
}

func TestALeaseIsReleasedOnlyWhenNoRenewalIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var renewing atomic.Bool
		released := false
		a := start(t, newLedger(t), storetest.NewMem(), "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		a.store.SetHook(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "delete" {
				released = true
				if renewing.Load() {
					t.Error("the release overtakes a renewal")
				}
				return do(ctx)
			}
			renewing.Store(true)
			defer renewing.Store(false)
			return hang(ctx, call, do)
		})
		time.Sleep(11 * time.Second)
		if !renewing.Load() {
			t.Fatal("no renewal is under way")
		}
		a.stop()
		if !released {
			t.Error("the lease is not released")
		}
	})
}

// Known fault 1 (I4): the lease is released before the job has stopped.
func TestTheLeaseIsReleasedOnlyAfterTheJobHasReturned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{
			Watch: func(ctx context.Context) error {
				<-ctx.Done()
				return nil
			},
			Reconcile: func(ctx context.Context) error {
				l.begin("a")
				<-ctx.Done()
				time.Sleep(8 * time.Second) // winds up, longer than any other waits to acquire
				if _, err := store.Get(context.Background(), leaseKey); err != nil {
					t.Errorf("while the job runs: %v", err)
				}
				l.end("a", context.Cause(ctx))
				return nil
			},
		})
		synctest.Wait()
		start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		a.stop()
		settle()
		if l.holder() != "b" {
			t.Errorf("b's job does not run:\n%v", l)
		}
	})
}

func TestAJobThatTakesItsTimeToReturnStillHasItsLeaseRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{
			RenewInterval: 2 * time.Second,
			RenewDeadline: 4 * time.Second, // so the job has 25 s to return
			Reconcile: func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(20 * time.Second)
				return nil
			},
		})
		synctest.Wait()
		go a.Resign(context.Background())
		time.Sleep(19 * time.Second)
		h, err := a.lease.Read(t.Context())
		if err != nil || h.Age > 2*time.Second {
			t.Errorf("got %+v, %v; want a lease renewed not longer than 2 s ago", h, err)
		}
		if got := a.Status(); got.Role != tenure.RoleStopping || a.IsHolder() {
			t.Errorf("role %v, holder %v", got.Role, a.IsHolder())
		}
	})
}

// Known fault 2: any one renewal error drops the lease.
func TestRenewalsThatFailForAWhileCostNothing(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{
		"refused": refuse,
		"hanging": hang,
		"answers lost": func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			_ = do(ctx)
			return errLost
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLedger(t), storetest.NewMem()
				a := start(t, l, store, "a", tenure.CoordinatorConfig{})
				synctest.Wait()
				start(t, l, store, "b", tenure.CoordinatorConfig{})
				time.Sleep(31 * time.Second)
				a.store.SetHook(fault) // 1 s after a renewal; the deadline is 19 s away
				time.Sleep(14*time.Second + 300*time.Millisecond)
				if a.Status().LastError == "" {
					t.Error("the error does not show in the status")
				}
				a.store.SetHook(nil)
				time.Sleep(time.Minute)
				if got := a.Status(); got.Terms != 1 || l.holder() != "a" || got.LastError != "" {
					t.Errorf("%+v\n%v", got, l)
				}
			})
		})
	}
}

// Known fault 3: a renewal that hangs keeps the job running beyond the TTL.
func TestARenewalThatHangsEndsTheJobAtTheRenewDeadline(t *testing.T) {
	for name, fault := range map[string]storetest.Hook{
		"until its context ends": hang,
		"for ever, whatever its context": func(context.Context, storetest.Call, func(context.Context) error) error {
			time.Sleep(10 * time.Minute)
			return errLost
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLedger(t), storetest.NewMem()
				a := start(t, l, store, "a", tenure.CoordinatorConfig{})
				synctest.Wait()
				b := start(t, l, store, "b", tenure.CoordinatorConfig{})
				a.store.SetHook(fault)
				time.Sleep(20*time.Second - time.Millisecond)
				if l.holder() != "a" {
					t.Errorf("a's job does not run 20 s after its acquire:\n%v", l)
				}
				time.Sleep(time.Millisecond)
				synctest.Wait()
				if l.holder() != "" || !strings.Contains(l.String(), "20s a ends: "+tenure.ErrDeadline.Error()) {
					t.Errorf("a's job did not end at 20 s by its deadline:\n%v", l)
				}
				time.Sleep(15 * time.Second)
				if !b.IsHolder() {
					t.Errorf("b does not hold:\n%v", l)
				}
			})
		})
	}
}

// Known fault 4: a job that died leaves the lease renewed for ever.
func TestAJobThatEndsGivesTheLeaseToAnotherReplica(t *testing.T) {
	broken := errors.New("broken")
	for name, job := range map[string]func(context.Context) error{
		"by returning":     func(context.Context) error { return nil },
		"by an error":      func(context.Context) error { return broken },
		"by a false alarm": func(context.Context) error { return tenure.ErrLost },
		"by Goexit":        func(context.Context) error { runtime.Goexit(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l, store := newLedger(t), storetest.NewMem()
				cause := make(chan error, 10)
				a := start(t, l, store, "a", tenure.CoordinatorConfig{
					Watch: func(ctx context.Context) error {
						time.Sleep(10 * time.Second)
						return job(ctx)
					},
					Reconcile: func(ctx context.Context) error {
						l.run(ctx, "a")
						cause <- context.Cause(ctx)
						return nil
					},
				})
				synctest.Wait()
				b := start(t, l, store, "b", tenure.CoordinatorConfig{})
				time.Sleep(15 * time.Second)
				if err := <-cause; !errors.Is(err, tenure.ErrJobEnded) || !strings.Contains(err.Error(), "watch") {
					t.Errorf("the other func's context ended by %v, want ErrJobEnded by watch", err)
				} else if name == "by an error" && !errors.Is(err, broken) {
					t.Errorf("%v hides the job's error", err)
				}
				if !b.IsHolder() || a.IsHolder() {
					t.Errorf("the lease did not go to b within an AcquireInterval:\n%v", l)
				}
			})
		})
	}
}

func TestAJobThatPanicsReleasesTheLeaseAndPanicsOutOfRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		broken := errors.New("broken")
		c, err := tenure.NewCoordinator(newLease(t, store, tenure.LeaseConfig{}), tenure.CoordinatorConfig{
			Watch:     func(ctx context.Context) error { <-ctx.Done(); return nil },
			Reconcile: func(context.Context) error { panic(broken) },
		})
		wantErr(t, err, nil)
		defer func() {
			p, ok := recover().(*tenure.JobPanic)
			if !ok || !errors.Is(p, broken) || !strings.Contains(p.Error(), "coordinator_test.go") {
				t.Errorf("Run panicked with %v, want a JobPanic with the job's stack", p)
			}
			_, err := store.Get(t.Context(), leaseKey)
			wantErr(t, err, tenure.ErrNotFound)
			if c.IsHolder() || c.Status().Role != tenure.RoleStandby {
				t.Errorf("after the panic: %+v", c.Status())
			}
		}()
		c.Run(t.Context())
		t.Error("Run returned")
	})
}

// Known fault 10: Run ends after the first loss, and no replica competes again.
func TestAReplicaThatLostTheLeaseCompetesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		time.Sleep(time.Second)
		for i := range 5 {
			a.store.SetHook(hang)
			time.Sleep(time.Minute)
			if a.IsHolder() {
				t.Fatal("a holds though the store hangs")
			}
			a.store.SetHook(nil)
			time.Sleep(11 * time.Second)
			if !a.IsHolder() || a.Status().Terms != i+2 {
				t.Fatalf("a does not hold again: %+v\n%v", a.Status(), l)
			}
		}
	})
}

func TestAStolenLeaseEndsTheJobAtTheNextRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		cause := make(chan error, 1)
		start(t, l, store, "a", tenure.CoordinatorConfig{
			Reconcile: func(ctx context.Context) error {
				<-ctx.Done()
				cause <- context.Cause(ctx)
				return nil
			},
		})
		synctest.Wait()
		obj, err := store.Get(t.Context(), leaseKey)
		wantErr(t, err, nil)
		obj.Payload = []byte(`{"holder":"robber","term":"another","ttl_ms":30000}`)
		put(t, store, obj)
		time.Sleep(10*time.Second + time.Millisecond)
		select {
		case err := <-cause:
			var lost *tenure.LostError
			if !errors.As(err, &lost) || lost.To.Holder != "robber" {
				t.Errorf("got cause %v, want a LostError to robber", err)
			}
		default:
			t.Error("the job was not told")
		}
	})
}

func TestAJobThatIgnoresItsContextIsReportedAndKeepsItsReplicaFromCompeting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		stuck := make(chan time.Duration, 1)
		returnNow := make(chan struct{})
		first := true
		a := start(t, l, store, "a", tenure.CoordinatorConfig{
			Reconcile: func(ctx context.Context) error {
				if !first {
					<-ctx.Done()
					return nil
				}
				first = false
				<-returnNow
				return nil
			},
			Trace: &tenure.Trace{JobStuck: func(_ *tenure.Term, since time.Duration) { stuck <- since }},
		})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantErr(t, a.Resign(ctx), context.DeadlineExceeded)
		time.Sleep(9 * time.Second) // TTL − Margin − RenewDeadline, less the second
		if since := <-stuck; since != 9*time.Second {
			t.Errorf("reported after %v, want 9s", since)
		}
		if got := a.Status(); !got.Stuck || got.Role != tenure.RoleStopping {
			t.Errorf("status: %+v", got)
		}
		if _, err := store.Get(t.Context(), leaseKey); err != nil {
			t.Errorf("the lease of a running job: %v", err)
		}
		time.Sleep(40 * time.Second)
		if !b.IsHolder() {
			t.Error("the lease of a stuck job did not expire")
		}
		if got := a.Status().Terms; got != 1 {
			t.Errorf("a has had %d terms while its job was stuck", got)
		}
		close(returnNow)
		b.stop()
		time.Sleep(11 * time.Second)
		if got := a.Status(); got.Stuck || !a.IsHolder() {
			t.Errorf("after its job returned: %+v", got)
		}
	})
}

func TestResignHandsTheLeaseToAnotherReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		a := start(t, l, store, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		b := start(t, l, store, "b", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		wantErr(t, b.Resign(t.Context()), nil) // has nothing to resign
		wantErr(t, a.Resign(t.Context()), nil)
		if a.IsHolder() || l.holder() == "a" {
			t.Error("a holds after Resign returned")
		}
		settle()
		if !b.IsHolder() || !strings.Contains(l.String(), "a ends: "+tenure.ErrResigned.Error()) {
			t.Errorf("b does not hold:\n%v", l)
		}
	})
}

func TestAReplicaThatHasResignedStaysAwayForAsLongAsItSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, newLedger(t), storetest.NewMem(), "a", tenure.CoordinatorConfig{})
		time.Sleep(time.Minute)
		wantErr(t, a.ResignFor(t.Context(), -1), tenure.ErrInvalid)
		wantErr(t, a.ResignFor(t.Context(), 5*time.Minute), nil)
		time.Sleep(5*time.Minute - time.Second)
		if got := a.Status(); got.Terms != 1 {
			t.Errorf("it competed before: %+v", got)
		}
		time.Sleep(2 * time.Second)
		if !a.IsHolder() {
			t.Error("it does not hold after that")
		}
	})
}

func TestShutdownTellsTheJobWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(t)
		a := start(t, l, storetest.NewMem(), "a", tenure.CoordinatorConfig{})
		time.Sleep(time.Second)
		a.stop()
		if !strings.Contains(l.String(), "1s a ends: "+tenure.ErrShutdown.Error()) {
			t.Errorf("got:\n%v", l)
		}
	})
}

func TestAShutdownDuringAnAcquireLeavesNoRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		slow := storetest.Faulty(store, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(time.Second): // the answer's way
				return err
			}
		})
		a := start(t, l, slow, "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		a.stop()
		_, err := store.Get(t.Context(), leaseKey)
		wantErr(t, err, tenure.ErrNotFound)
		if l.String() != "" {
			t.Errorf("the job ran:\n%v", l)
		}
	})
}

// A process that is paused within an acquire sees the answer late.
func TestAnAcquireAnsweredAfterTheRenewDeadlineBeginsNoJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		paused := false
		b := start(t, l, storetest.Faulty(store, func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			if call.Op == "put" && !paused {
				paused = true
				time.Sleep(21 * time.Second) // the trust lasts for 8 s more, and a job may take 9
			}
			return err
		}), "b", tenure.CoordinatorConfig{})
		time.Sleep(21*time.Second + time.Millisecond)
		if got := l.String(); got != "" {
			t.Errorf("a job was begun:\n%s", got)
		}
		if _, err := store.Get(t.Context(), leaseKey); !errors.Is(err, tenure.ErrNotFound) {
			t.Errorf("the lease is not given back: %v", err)
		}
		time.Sleep(5 * time.Second)
		if !b.IsHolder() {
			t.Error("b does not compete again")
		}
	})
}

func TestTheJobsContextCarriesTheTermAndTheCallersValues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		lease := newLease(t, storetest.NewMem(), tenure.LeaseConfig{Holder: "a"})
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Watch: func(ctx context.Context) error {
				term := tenure.TermFromContext(ctx)
				if term == nil || !term.Valid() || term.Holder() != "a" || term.Token() == 0 {
					t.Errorf("got term %v", term)
				}
				if ctx.Value(key{}) != "value" {
					t.Error("the caller's value is missing")
				}
				cancel()
				<-ctx.Done()
				return nil
			},
		})
		wantErr(t, err, nil)
		wantErr(t, c.Run(ctx), nil)
		if tenure.TermFromContext(t.Context()) != nil {
			t.Error("a term outside a job")
		}
	})
}

func TestASingleReplicaRunsItsJobWithoutLeaseTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		store.Single = true
		l := newLedger(t)
		ends := 0
		a := start(t, l, store, "a", tenure.CoordinatorConfig{
			Reconcile: func(ctx context.Context) error {
				term := tenure.TermFromContext(ctx)
				if !term.Valid() || term.Token() == 0 {
					t.Errorf("got term %+v", term)
				}
				if ends++; ends == 1 {
					return errors.New("fails once")
				}
				l.run(ctx, "a")
				return nil
			},
		})
		a.store.SetHook(func(_ context.Context, call storetest.Call, _ func(context.Context) error) error {
			t.Errorf("call to the store: %v", call)
			return errLost
		})
		time.Sleep(time.Hour)
		if !a.IsHolder() || a.Status().Terms != 2 {
			t.Errorf("got %+v, want a second term", a.Status())
		}
		a.stop()
		if a.IsHolder() || l.holder() != "" {
			t.Error("the job outlasts Run")
		}
	})
}

func TestACoordinatorRunsOnceAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := start(t, newLedger(t), storetest.NewMem(), "a", tenure.CoordinatorConfig{})
		synctest.Wait()
		wantErr(t, a.Run(t.Context()), tenure.ErrInvalid)
		a.stop()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantErr(t, a.Run(ctx), nil)
	})
}

func TestAStoreThatNeedsSomebodysHandIsAskedSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int32
		store := storetest.Faulty(storetest.NewMem(), func(context.Context, storetest.Call, func(context.Context) error) error {
			asked.Add(1)
			return fmt.Errorf("password authentication failed: %w", tenure.ErrSetup)
		})
		a := start(t, newLedger(t), store, "a", tenure.CoordinatorConfig{})
		time.Sleep(10 * time.Minute)
		if n := asked.Load(); n < 20 || n > 30 {
			t.Errorf("asked %d times in 10 minutes, want once in 30 s", n)
		}
		if got := a.Status().LastError; !strings.Contains(got, "password") {
			t.Errorf("status says %q", got)
		}
		store.SetHook(nil)
		time.Sleep(30 * time.Second)
		if !a.IsHolder() {
			t.Error("a does not hold though the store is well again")
		}
	})
}

func TestALongTTLDoesNotMakeASetupThatWasMendedWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), func(context.Context, storetest.Call, func(context.Context) error) error {
			return tenure.ErrSetup
		})
		c, err := tenure.NewCoordinator(newLease(t, store, tenure.LeaseConfig{TTL: 6 * time.Hour}), tenure.CoordinatorConfig{
			Watch:           func(ctx context.Context) error { <-ctx.Done(); return nil },
			AcquireInterval: 5 * time.Second,
		})
		wantErr(t, err, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- c.Run(ctx) }()
		time.Sleep(time.Second)
		store.SetHook(nil)
		time.Sleep(time.Minute)
		if !c.IsHolder() {
			t.Error("no holder a minute after the setup was mended")
		}
		cancel()
		wantErr(t, <-done, nil)
	})
}

func TestAReplicaThatWasAskedToResignWhileItStoppedStaysAwayAllTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLedger(t)
		a := start(t, l, storetest.NewMem(), "a", tenure.CoordinatorConfig{
			Reconcile: func(ctx context.Context) error { <-ctx.Done(); time.Sleep(time.Second); return nil },
		})
		synctest.Wait()
		a.store.SetHook(hang)
		time.Sleep(20*time.Second + time.Millisecond) // its renewals have failed for too long
		a.store.SetHook(nil)
		wantErr(t, a.Resign(t.Context()), nil)
		time.Sleep(7 * time.Second)
		if a.IsHolder() {
			t.Error("holds again before every standby has tried")
		}
		time.Sleep(3 * time.Second)
		if !a.IsHolder() {
			t.Error("does not compete again")
		}
	})
}

func TestManyReplicasUnderFaultsNeverOverlap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, store := newLedger(t), storetest.NewMem()
		replicas := make([]*replica, 5)
		for i := range replicas {
			replicas[i] = start(t, l, store, fmt.Sprint("r", i), tenure.CoordinatorConfig{})
		}
		faults := []storetest.Hook{hang, refuse, nil, nil, func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
			err := do(ctx)
			time.Sleep(3 * time.Second)
			return err
		}}
		held := 0
		for i := range 2000 {
			replicas[i*7%5].store.SetHook(faults[i*3%len(faults)])
			time.Sleep(time.Duration(i%41) * time.Second)
			if l.holder() != "" {
				held++
			}
		}
		if held < 1000 {
			t.Errorf("somebody held in %d of 2000 samples", held)
		}
	})
}

func TestACoordinatorNamesEveryContradictionInItsConfig(t *testing.T) {
	job := func(context.Context) error { return nil }
	_, err := tenure.NewCoordinator(nil, tenure.CoordinatorConfig{Watch: job})
	wantErr(t, err, tenure.ErrInvalid)
	for name, test := range map[string]struct {
		ttl  time.Duration
		cfg  tenure.CoordinatorConfig
		says []string
	}{
		"defaults":              {0, tenure.CoordinatorConfig{Watch: job}, nil},
		"no job":                {0, tenure.CoordinatorConfig{}, nil},
		"renewal after TTL":     {time.Second, tenure.CoordinatorConfig{Watch: job, RenewInterval: time.Second}, []string{"RenewInterval 1s"}},
		"deadline beyond TTL":   {time.Second, tenure.CoordinatorConfig{Watch: job, RenewDeadline: time.Second}, []string{"RenewDeadline 1s"}},
		"no time for a renewal": {0, tenure.CoordinatorConfig{Watch: job, RenewInterval: 20*time.Second - time.Millisecond}, []string{"RenewDeadline 20s", "RenewInterval 19.999s"}},
		"no time to return":     {0, tenure.CoordinatorConfig{Watch: job, RenewDeadline: 29*time.Second - time.Millisecond}, []string{"RenewDeadline 28.999s", "no time to return"}},
		"deadline before next":  {0, tenure.CoordinatorConfig{Watch: job, RenewDeadline: 9 * time.Second}, []string{"RenewDeadline 9s", "RenewInterval 10s"}},
		"everything": {time.Second, tenure.CoordinatorConfig{RenewInterval: -1, AcquireInterval: -1, RenewDeadline: time.Hour},
			[]string{"RenewInterval -1ns", "AcquireInterval -1ns", "RenewDeadline 1h"}},
	} {
		lease := newLease(t, storetest.NewMem(), tenure.LeaseConfig{TTL: test.ttl})
		_, err := tenure.NewCoordinator(lease, test.cfg)
		if test.says == nil {
			wantErr(t, err, nil)
			continue
		}
		if !errors.Is(err, tenure.ErrInvalid) {
			t.Errorf("%s: got %v, want ErrInvalid", name, err)
			continue
		}
		for _, want := range test.says {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %q does not name %q", name, err, want)
			}
		}
	}
}

func TestAReplicaWithoutAJobOnlyHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		a := startWith(t, store, tenure.LeaseConfig{Holder: "a"}, tenure.CoordinatorConfig{})
		synctest.Wait()
		b := startWith(t, store, tenure.LeaseConfig{Holder: "b"}, tenure.CoordinatorConfig{})
		time.Sleep(time.Hour)
		if got := a.Status(); !a.IsHolder() || b.IsHolder() || got.Role != tenure.RoleHolder || got.Terms != 1 {
			t.Errorf("a: %+v, b: %+v", got, b.Status())
		}
		wantErr(t, a.Resign(t.Context()), nil)
		synctest.Wait()
		if a.IsHolder() || !b.IsHolder() {
			t.Errorf("after a has resigned: %+v", b.Status())
		}
		b.store.SetHook(refuse)
		time.Sleep(20*time.Second + time.Second)
		if b.IsHolder() {
			t.Error("b holds past its renew deadline")
		}
	})
}
