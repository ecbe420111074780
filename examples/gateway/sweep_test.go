//go:build unix

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

const testGrace = time.Minute

// sweepTest is what a sweep needs, in virtual time.
type sweepTest struct {
	*watchers
	t      *testing.T
	job    context.Context // of a term of the lease in the store
	store  *storetest.FaultyStore
	driver *fakeDriver
}

func newSweepTest(t *testing.T) *sweepTest {
	st := &sweepTest{t: t, store: newStore(), driver: newFakeDriver()}
	st.watchers = &watchers{sandboxes: sandboxes{st.store}, driver: st.driver, grace: testGrace, log: quiet}
	st.job = jobContext(t, st.store)
	return st
}

// jobContext starts a term that lasts as long as the test, and returns the context of its
// job.
func jobContext(t *testing.T, store tenure.Store) context.Context {
	t.Helper()
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	began := make(chan context.Context, 1)
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
		Reconcile: func(ctx context.Context) error {
			began <- ctx
			<-ctx.Done()
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	returned := make(chan error, 1)
	go func() { returned <- coordinator.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-returned; err != nil {
			t.Error(err)
		}
	})
	return <-began
}

// takeOver gives the lease to another replica without the holder noticing.
func takeOver(ctx context.Context, store tenure.Store) error {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Holder: "another", Logger: quiet})
	if err != nil {
		return err
	}
	held, err := lease.Read(ctx)
	if err != nil {
		return err
	}
	if err := store.DeleteIf(ctx, held.Key, held.Version); err != nil {
		return err
	}
	_, err = lease.TryAcquire(ctx)
	return err
}

// add stores a sandbox in a phase. Its instance has the sandbox's name as its ID.
func (st *sweepTest) add(name string, phase Phase) Sandbox {
	st.t.Helper()
	sb := Sandbox{Name: name, record: record{Instance: name, Command: []string{"x"}, Phase: phase}}
	sb, err := st.sandboxes.put(st.t.Context(), sb, tenure.MustCreate())
	if err != nil {
		st.t.Fatal(err)
	}
	return sb
}

// run adds an instance to the backend.
func (st *sweepTest) run(id string, alive bool) {
	st.driver.set(Instance{ID: id, Name: id, CreatedAt: time.Now(), PID: 42, Alive: alive})
}

// phase returns a sandbox's phase, or "gone" if there is no such sandbox.
func (st *sweepTest) phase(name string) Phase {
	st.t.Helper()
	sb, err := st.sandboxes.get(st.t.Context(), name)
	if errors.Is(err, tenure.ErrNotFound) {
		return "gone"
	}
	if err != nil {
		st.t.Fatal(err)
	}
	return sb.Phase
}

func (st *sweepTest) mustSweep() {
	st.t.Helper()
	if err := st.sweep(st.job); err != nil {
		st.t.Fatal(err)
	}
}

func TestASweepReconcilesRecordsAndProcesses(t *testing.T) {
	const (
		young = testGrace / 2
		old   = testGrace + time.Second
	)
	const ( // the state of an instance before or after the sweep
		none  = "none"
		alive = "alive"
		dead  = "dead"
	)
	for _, tt := range []struct {
		name         string
		phase        Phase // "gone" if there is no record
		instance     string
		age          time.Duration
		wantPhase    Phase
		wantInstance string
	}{
		{"a live sandbox is left alone", Ready, alive, old, Ready, alive},
		{"a dead one is an error", Ready, dead, young, Error, dead},
		{"one that the backend doesn't know is an error", Ready, none, young, Error, none},
		{"a creation has time", Provisioning, none, young, Provisioning, none},
		{"a creation has time to start its process", Provisioning, alive, young, Provisioning, alive},
		{"a creation that was not finished is an error", Provisioning, none, old, Error, none},
		{"an error is shown for a while", Error, dead, young, Error, dead},
		{"an error is pruned after the grace", Error, dead, old, "gone", none},
		{"an error is pruned without an instance too", Error, none, old, "gone", none},
		{"an error has no process", Error, alive, young, Error, none},
		{"a deletion is finished", Deleting, alive, young, "gone", none},
		{"a deletion is finished after its process", Deleting, none, young, "gone", none},
		{"an instance without a record has time", "gone", alive, young, "gone", alive},
		{"an orphan is ended", "gone", alive, old, "gone", none},
		{"an orphan is forgotten", "gone", dead, old, "gone", none},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := newSweepTest(t)
				if tt.phase != "gone" {
					st.add("box", tt.phase)
				}
				if tt.instance != none {
					st.run("box", tt.instance == alive)
				}
				time.Sleep(tt.age)
				st.mustSweep()
				if got := st.phase("box"); got != tt.wantPhase {
					t.Errorf("the sandbox is %s, want %s", got, tt.wantPhase)
				}
				instance := none
				if inst, err := st.driver.Get(t.Context(), "box"); err == nil && inst.Alive {
					instance = alive
				} else if err == nil {
					instance = dead
				}
				if instance != tt.wantInstance {
					t.Errorf("the instance is %s, want %s", instance, tt.wantInstance)
				}
			})
		})
	}
}

// An unfinished creation whose process runs becomes an error. The next sweep ends the
// process, and a sweep after the grace period removes the record.
func TestAnUnfinishedCreationIsCleanedUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSweepTest(t)
		st.add("box", Provisioning)
		st.run("box", true)
		time.Sleep(testGrace + time.Second)
		st.mustSweep()
		time.Sleep(time.Second)
		st.mustSweep()
		if _, err := st.driver.Get(t.Context(), "box"); !errors.Is(err, errNoInstance) {
			t.Errorf("its instance: %v, want %v", err, errNoInstance)
		}
		time.Sleep(testGrace)
		st.mustSweep()
		if got := st.phase("box"); got != "gone" {
			t.Errorf("the sandbox is %s", got)
		}
	})
}

func TestASandboxInErrorIsPrunedOneSweepAfterTheGracePeriodAtMost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 7 * time.Second
		st := newSweepTest(t)
		sb := st.add("box", Ready)
		ctx, cancel := context.WithCancel(st.job)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- tenure.Every(interval, st.sweep)(ctx) }()
		time.Sleep(3500 * time.Millisecond) // one of the next sweeps comes just before the end of the grace period
		_, err := st.sandboxes.fail(t.Context(), sb, "test")
		if err != nil {
			t.Fatal(err)
		}
		wrote := time.Now()
		for st.phase("box") != "gone" {
			time.Sleep(100 * time.Millisecond)
			if time.Since(wrote) > 10*testGrace {
				t.Fatal("it is not pruned")
			}
		}
		if took := time.Since(wrote); took < testGrace || took > testGrace+interval {
			t.Errorf("pruned after %v, want between %v and %v", took, testGrace, testGrace+interval)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestARecordWrittenSinceTheSweepBeganIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSweepTest(t)
		// A sandbox is created after the sweep lists the backend and before it lists the store.
		st.driver.onList = func() {
			time.Sleep(time.Second)
			st.run("box", true)
			st.add("box", Ready)
			time.Sleep(time.Second)
		}
		st.mustSweep()
		if got := st.phase("box"); got != Ready {
			t.Errorf("the sandbox is %s, want %s", got, Ready)
		}
		st.driver.onList = nil
		st.mustSweep()
		if got := st.phase("box"); got != Ready {
			t.Errorf("after the next sweep the sandbox is %s, want %s", got, Ready)
		}
	})
}

func TestASweepDoesNotOverwriteConcurrentChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSweepTest(t)
		sb := st.add("box", Ready)
		time.Sleep(time.Second)
		st.store.SetHook(before("put", func() error {
			st.store.SetHook(nil)
			_, err := st.sandboxes.doom(t.Context(), sb)
			return err
		}))
		st.mustSweep()
		if got := st.phase("box"); got != Deleting {
			t.Errorf("the sandbox is %s, want %s", got, Deleting)
		}
	})
}

func TestARecordThatFailsDoesNotStopTheSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSweepTest(t)
		st.add("a", Deleting)
		st.add("b", Deleting)
		st.add("c", Ready)
		if _, err := st.store.PutIf(t.Context(), tenure.Object{Key: sandboxKey("broken"), Payload: []byte("{")}, tenure.MustCreate()); err != nil {
			t.Fatal(err)
		}
		st.run("orphan", true)
		fault := errors.New("it resists")
		st.driver.onDelete = func(id string) error {
			if id == "a" {
				return fault
			}
			return nil
		}
		time.Sleep(2 * testGrace)
		err := st.sweep(st.job)
		if !errors.Is(err, fault) || !strings.Contains(err.Error(), "sandbox a: ") || !strings.Contains(err.Error(), "sandbox broken: ") {
			t.Errorf("got %v, want an error that names a and broken", err)
		}
		for name, want := range map[string]Phase{"a": Deleting, "b": "gone", "c": Error, "broken": Unknown} {
			if got := st.phase(name); got != want {
				t.Errorf("the sandbox %s is %s, want %s", name, got, want)
			}
		}
		if _, err := st.driver.Get(t.Context(), "orphan"); !errors.Is(err, errNoInstance) {
			t.Errorf("the orphan: %v, want %v", err, errNoInstance)
		}
	})
}

// Without the store, orphans cannot be distinguished from the processes of sandboxes.
func TestNoProcessIsEndedWhileTheStoreIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSweepTest(t)
		st.add("box", Ready)
		st.run("box", true)
		time.Sleep(2 * testGrace)
		down := errors.New("down")
		st.store.SetHook(before("list", func() error { return down }))
		if err := st.sweep(st.job); !errors.Is(err, down) {
			t.Errorf("got %v, want %v", err, down)
		}
		if got, err := st.driver.Get(t.Context(), "box"); err != nil || !got.Alive {
			t.Errorf("the instance is %+v, %v", got, err)
		}
	})
}

func TestASweepEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSweepTest(t)
		st.add("a", Deleting)
		st.add("b", Deleting)
		time.Sleep(time.Second)
		ctx, cancel := context.WithCancelCause(st.job)
		st.driver.onDelete = func(string) error {
			cancel(tenure.ErrLost)
			return nil
		}
		if err := st.sweep(ctx); !errors.Is(err, tenure.ErrLost) {
			t.Errorf("got %v, want %v", err, tenure.ErrLost)
		}
		// The process of a is gone, so its record is deleted, too.
		for name, want := range map[string]Phase{"a": "gone", "b": Deleting} {
			if got := st.phase(name); got != want {
				t.Errorf("the sandbox %s is %s, want %s", name, got, want)
			}
		}
	})
}

func TestASweepWhoseLeaseWasTakenOverWritesNothing(t *testing.T) {
	for _, tt := range []struct {
		name  string
		phase Phase
		write string
	}{
		{"a dead sandbox stays Ready", Ready, "put"},
		{"a deletion stays unfinished", Deleting, "delete"},
		{"an old error is not pruned", Error, "delete"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				st := newSweepTest(t)
				var log bytes.Buffer
				st.log = slog.New(slog.NewTextHandler(&log, nil))
				want := []Sandbox{st.add("a", tt.phase), st.add("b", tt.phase)}
				time.Sleep(testGrace + time.Second) // between two renewals
				st.store.SetHook(before(tt.write, func() error {
					st.store.SetHook(nil)
					return takeOver(t.Context(), st.store)
				}))
				if err := st.sweep(st.job); err != nil {
					t.Errorf("the sweep got %v, want nil", err)
				}
				if err := st.job.Err(); err != nil {
					t.Fatalf("the job's context has ended: %v; so the fence was not tested", err)
				}
				for _, want := range want {
					if got, err := st.sandboxes.get(t.Context(), want.Name); err != nil || got.Version != want.Version {
						t.Errorf("the record is %+v, %v, want it unchanged, %+v", got, err, want)
					}
				}
				line := fmt.Sprintf(`level=WARN msg="write refused: the term is over" token=%d sandbox=a error="`,
					tenure.TermFromContext(st.job).Token())
				if got := log.String(); !strings.Contains(got, line) || strings.Count(got, "\n") != 1 {
					t.Errorf("it logged\n%s\nwant one line with\n%s", got, line)
				}
			})
		})
	}
}
