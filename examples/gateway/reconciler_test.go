package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

const testGrace = time.Minute

// jobTest is what a sweep or the watch needs, in virtual time.
type jobTest struct {
	*reconciler
	t      *testing.T
	job    context.Context // of a term of the lease in the store
	store  *storetest.FaultyStore
	driver *fakeDriver
}

// inJob calls test in a bubble, during a term of a replica that runs nothing else.
func inJob(t *testing.T, test func(st *jobTest)) {
	synctest.Test(t, func(t *testing.T) {
		st := &jobTest{t: t, store: newStore(t), driver: newFakeDriver()}
		st.reconciler = &reconciler{sandboxes: sandboxes{st.store}, driver: st.driver, grace: testGrace}
		lease, err := tenure.NewLease(st.store, tenure.LeaseConfig{Key: leaseKey})
		require.NoError(t, err)
		_ = tenure.Do(t.Context(), lease, func(ctx context.Context) error { // the error of a test that takes the lease over says so
			st.job = ctx
			test(st)
			return nil
		})
	})
}

// takeOver gives the lease to another replica without the holder noticing.
func takeOver(ctx context.Context, store tenure.Store) error {
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: leaseKey, Holder: "another"})
	if err != nil {
		return err
	}
	held, err := lease.Read(ctx)
	if err != nil {
		return err
	}
	if err := store.DeleteIf(ctx, held.Key, tenure.IfVersion(held.Version)); err != nil {
		return err
	}
	_, err = lease.TryAcquire(ctx)
	return err
}

// instanceOf is the instance of a sandbox of a test.
func instanceOf(name string) string { return name + ".1" }

// add stores a sandbox in a phase.
func (st *jobTest) add(name string, phase Phase) Sandbox {
	st.t.Helper()
	sb, err := st.sandboxes.put(st.t.Context(), Sandbox{Name: name, Instance: instanceOf(name), Phase: phase}, tenure.IfAbsent())
	require.NoError(st.t, err)
	return sb
}

// run adds a sandbox's instance to the backend.
func (st *jobTest) run(name string) {
	st.t.Helper()
	require.NoError(st.t, st.driver.Create(st.t.Context(), instanceOf(name)))
}

func (st *jobTest) exists(name string) bool {
	exists, _ := st.driver.Has(st.t.Context(), instanceOf(name))
	return exists
}

// phase returns a sandbox's phase, or "none" if there is no such sandbox.
func (st *jobTest) phase(name string) Phase {
	st.t.Helper()
	sb, err := st.sandboxes.get(st.t.Context(), name)
	if errors.Is(err, tenure.ErrNotFound) {
		return "none"
	}
	require.NoError(st.t, err)
	return sb.Phase
}

func TestASweepReconcilesRecordsAndInstances(t *testing.T) {
	const (
		young = testGrace / 2
		old   = testGrace + time.Second
	)
	for _, tt := range []struct {
		name       string
		phase      Phase // "none" if there is no record
		exists     bool
		age        time.Duration
		wantPhase  Phase
		wantExists bool
	}{
		{"a sandbox with its instance is left alone", Ready, true, old, Ready, true},
		{"one without is in error", Ready, false, young, Error, false},
		{"a creation has time", Provisioning, false, young, Provisioning, false},
		{"a creation has time to write its record", Provisioning, true, young, Provisioning, true},
		{"a creation that was not finished is pruned", Provisioning, false, old, "none", false},
		{"a creation that was not recorded is finished", Provisioning, true, old, Ready, true},
		{"an error is shown for a while", Error, false, young, Error, false},
		{"an error is pruned after the grace", Error, false, old, "none", false},
		{"an instance without a record has time", "none", true, young, "none", true},
		{"an orphan is removed", "none", true, old, "none", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inJob(t, func(st *jobTest) {
				if tt.phase != "none" {
					st.add("box", tt.phase)
				}
				if tt.exists {
					st.run("box")
				}
				time.Sleep(tt.age)
				require.NoError(st.t, st.sweep(st.job))
				require.Equal(st.t, tt.wantPhase, st.phase("box"))
				require.Equal(st.t, tt.wantExists, st.exists("box"))
			})
		})
	}
}

// A slow request creates an instance between the list of the backend and what the sweep would write about its
// absence.
func TestASweepLooksASecondTimeBeforeItGivesASandboxUp(t *testing.T) {
	for before, after := range map[Phase]Phase{Provisioning: "none", Ready: Error} {
		inJob(t, func(st *jobTest) {
			for _, name := range []string{"slow", "lost"} {
				st.add(name, before)
			}
			time.Sleep(testGrace + time.Second)
			st.driver.onList = func() { st.run("slow") }
			require.NoError(st.t, st.sweep(st.job))
			require.Equal(st.t, after, st.phase("lost"), "the sweep is about to write")
			require.NotEqual(st.t, after, st.phase("slow"))
			require.True(st.t, st.exists("slow"))
		})
	}
}

func TestASweepDoesNotOverwriteConcurrentChanges(t *testing.T) {
	inJob(t, func(st *jobTest) {
		sb := st.add("box", Provisioning)
		time.Sleep(testGrace + time.Second)
		st.store.SetHook(before("delete", func() error {
			st.store.SetHook(nil)
			_, err := st.sandboxes.set(st.t.Context(), sb, Ready)
			return err
		}))
		require.NoError(st.t, st.sweep(st.job))
		require.Equal(st.t, Ready, st.phase("box"))
	})
}

func TestARecordThatFailsDoesNotStopTheSweep(t *testing.T) {
	inJob(t, func(st *jobTest) {
		st.add("a", Ready)
		st.add("b", Ready)
		st.run("orphan")
		fault := errors.New("it resists")
		time.Sleep(2 * testGrace)
		st.store.SetHook(before("put", func() error {
			st.store.SetHook(nil)
			return fault
		}))
		require.ErrorContains(st.t, st.sweep(st.job), "sandbox a: it resists")
		require.Equal(st.t, Ready, st.phase("a"))
		require.Equal(st.t, Error, st.phase("b"))
		require.False(st.t, st.exists("orphan"))
	})
}

// Without the store, orphans cannot be distinguished from the instances of sandboxes.
func TestNoInstanceIsRemovedWhileTheStoreIsDown(t *testing.T) {
	inJob(t, func(st *jobTest) {
		st.add("box", Ready)
		st.run("box")
		time.Sleep(2 * testGrace)
		down := errors.New("down")
		st.store.SetHook(before("list", func() error { return down }))
		require.ErrorIs(st.t, st.sweep(st.job), down)
		require.True(st.t, st.exists("box"))
	})
}

func TestASweepWhoseLeaseWasTakenOverWritesNothing(t *testing.T) {
	for phase, write := range map[Phase]string{Ready: "put", Error: "delete"} {
		inJob(t, func(st *jobTest) {
			want := []Sandbox{st.add("a", phase), st.add("b", phase)}
			time.Sleep(testGrace + time.Second) // between two renewals
			st.store.SetHook(before(write, func() error {
				st.store.SetHook(nil)
				return errors.Join(takeOver(st.t.Context(), st.store), st.job.Err()) // an error: the fence would not be asked
			}))
			require.ErrorIs(st.t, st.sweep(st.job), tenure.ErrLost)
			for _, want := range want {
				got, err := st.sandboxes.get(st.t.Context(), want.Name)
				require.NoError(st.t, err)
				require.Equal(st.t, want.version, got.version)
			}
		})
	}
}

// spawn starts a gateway's reconciler, and stops it at the end of the test.
func spawn(t *testing.T, store tenure.Store, driver Driver, replica string) *reconciler {
	t.Helper()
	r, err := newReconciler(store, driver, config{replica: replica, ttl: 30 * time.Second, sweep: time.Minute, grace: testGrace})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	returned := make(chan error, 1)
	go func() { returned <- r.coordinator.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-returned)
	})
	synctest.Wait()
	return r
}

func TestAGatewayThatCannotReachTheBackendReleasesTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, blind := newStore(t), newFakeDriver()
		a := spawn(t, store, blind, "a")
		b := spawn(t, store, newFakeDriver(), "b")
		close(blind.gone)
		time.Sleep(2 * time.Second)
		require.False(t, a.coordinator.IsHolder())
		require.True(t, b.coordinator.IsHolder())
	})
}

func TestTheWatchRecordsThatTheInstanceOfASandboxIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, driver := newStore(t), newFakeDriver()
		st := &jobTest{t: t, reconciler: &reconciler{sandboxes: sandboxes{store}}, store: store, driver: driver}
		spawn(t, store, driver, "a")
		st.add("box", Ready)
		st.add("again", Ready)
		st.run("again")
		driver.gone <- "again.0" // an earlier instance
		driver.gone <- "nobody.1"
		driver.gone <- instanceOf("box")
		synctest.Wait()
		require.Equal(t, Error, st.phase("box"))
		require.Equal(t, Ready, st.phase("again"))
	})
}

// The watch and the sweep are two goroutines of one job.
func TestTheWatchAndTheSweepTakeTurns(t *testing.T) {
	inJob(t, func(st *jobTest) {
		st.add("box", Ready)
		var calls []string
		called := func(op string) storetest.Hook {
			return before(op, func() error {
				require.False(st.t, st.mu.TryLock(), "another goroutine of the job could change sandboxes now")
				calls = append(calls, op)
				return nil
			})
		}
		st.store.SetHook(called("get"))
		require.NoError(st.t, st.gone(st.job, st.sandboxes, instanceOf("box")))
		st.store.SetHook(called("list"))
		require.NoError(st.t, st.sweep(st.job))
		require.Equal(st.t, []string{"get", "list"}, calls)
	})
}
