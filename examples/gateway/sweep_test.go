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

	"github.com/stretchr/testify/require"

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
	st := &sweepTest{t: t, store: newStore(t), driver: newFakeDriver()}
	st.watchers = &watchers{sandboxes: sandboxes{st.store}, driver: st.driver, grace: testGrace, log: slog.Default()}
	lease, err := tenure.NewLease(st.store, tenure.LeaseConfig{Key: leaseKey})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	began, returned := make(chan context.Context), make(chan error)
	go func() {
		returned <- tenure.Do(ctx, lease, func(ctx context.Context) error {
			began <- ctx
			<-ctx.Done()
			return nil
		})
	}()
	t.Cleanup(func() { cancel(); <-returned }) // the error of a test that takes the lease over says so
	st.job = <-began
	return st
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

// add stores a sandbox in a phase. Its instance has the sandbox's name as its ID.
func (st *sweepTest) add(name string, phase Phase) Sandbox {
	st.t.Helper()
	sb := Sandbox{Name: name, record: record{Instance: name, Command: []string{"x"}, Phase: phase}}
	sb, err := st.sandboxes.put(st.t.Context(), sb, tenure.IfAbsent())
	require.NoError(st.t, err)
	return sb
}

// run adds an instance to the backend.
func (st *sweepTest) run(id string, alive bool) {
	st.driver.set(Instance{ID: id, CreatedAt: time.Now(), PID: 42, Alive: alive})
}

// phase returns a sandbox's phase, or "gone" if there is no such sandbox.
func (st *sweepTest) phase(name string) Phase {
	st.t.Helper()
	sb, err := st.sandboxes.get(st.t.Context(), name)
	if errors.Is(err, tenure.ErrNotFound) {
		return "gone"
	}
	require.NoError(st.t, err)
	return sb.Phase
}

func (st *sweepTest) mustSweep() {
	st.t.Helper()
	require.NoError(st.t, st.sweep(st.job))
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
				require.Equal(t, tt.wantPhase, st.phase("box"))
				instance := none
				if exists, isAlive := st.driver.has("box"); isAlive {
					instance = alive
				} else if exists {
					instance = dead
				}
				require.Equal(t, tt.wantInstance, instance)
			})
		})
	}
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
		require.Equal(t, Ready, st.phase("box"))
		st.driver.onList = nil
		st.mustSweep()
		require.Equal(t, Ready, st.phase("box"))
	})
}

func TestASweepDoesNotOverwriteConcurrentChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSweepTest(t)
		sb := st.add("box", Ready)
		time.Sleep(time.Second)
		st.store.SetHook(before("put", func() error {
			st.store.SetHook(nil)
			_, err := st.sandboxes.startDeletion(t.Context(), sb)
			return err
		}))
		st.mustSweep()
		require.Equal(t, Deleting, st.phase("box"))
	})
}

func TestARecordThatFailsDoesNotStopTheSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := newSweepTest(t)
		st.add("a", Deleting)
		st.add("b", Deleting)
		st.add("c", Ready)
		_, err := st.store.PutIf(t.Context(), tenure.Object{Key: sandboxKey("broken"), Payload: []byte("{")}, tenure.IfAbsent())
		require.NoError(t, err)
		st.run("orphan", true)
		fault := errors.New("it resists")
		st.driver.onDelete = func(id string) error {
			if id == "a" {
				return fault
			}
			return nil
		}
		time.Sleep(2 * testGrace)
		err = st.sweep(st.job)
		require.ErrorIs(t, err, fault)
		require.ErrorContains(t, err, "sandbox a: ")
		require.ErrorContains(t, err, "sandbox broken: ")
		for name, want := range map[string]Phase{"a": Deleting, "b": "gone", "c": Error, "broken": Unknown} {
			require.Equal(t, want, st.phase(name))
		}
		exists, _ := st.driver.has("orphan")
		require.False(t, exists)
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
		require.ErrorIs(t, st.sweep(st.job), down)
		_, alive := st.driver.has("box")
		require.True(t, alive)
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
		require.ErrorIs(t, st.sweep(ctx), tenure.ErrLost)
		// The process of a is gone, so its record goes too.
		for name, want := range map[string]Phase{"a": "gone", "b": Deleting} {
			require.Equal(t, want, st.phase(name))
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
					return errors.Join(takeOver(t.Context(), st.store), st.job.Err()) // an error: the fence would not be asked
				}))
				require.NoError(t, st.sweep(st.job))
				for _, want := range want {
					got, err := st.sandboxes.get(t.Context(), want.Name)
					require.NoError(t, err)
					require.Equal(t, want.Version, got.Version)
				}
				line := fmt.Sprintf(`level=WARN msg="write refused: the term is over" token=%d sandbox=a error="`,
					tenure.TermFromContext(st.job).Token())
				require.Contains(t, log.String(), line)
				require.Equal(t, 1, strings.Count(log.String(), "\n"), &log)
			})
		})
	}
}
