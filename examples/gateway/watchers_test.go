//go:build unix

package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tenurelib/tenure"
)

// spawn starts a replica's watchers in virtual time, and stops them at the end of the test.
func spawn(t *testing.T, store tenure.Store, driver Driver, replica string) (w *watchers, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w, err := spawnWatchers(ctx, store, driver, watchersConfig{
		replica: replica,
		ttl:     30 * time.Second,
		sweep:   time.Minute,
		grace:   testGrace,
		log:     quiet,
	})
	require.NoError(t, err)
	stop = func() {
		cancel()
		<-w.stopped
		require.NoError(t, w.err)
	}
	t.Cleanup(stop)
	return w, stop
}

func TestOnlyTheHolderSweepsAndAStoppedOneIsReplacedWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, driver := newStore(t), newFakeDriver()
		a, stopA := spawn(t, store, driver, "a")
		synctest.Wait()
		b, stopB := spawn(t, store, driver, "b")
		time.Sleep(10*time.Minute + time.Second)
		require.EqualValues(t, 11, a.sweeps.Load())
		require.Zero(t, b.sweeps.Load())
		stopA()
		time.Sleep(time.Second)
		require.True(t, b.coordinator.IsHolder())
		require.EqualValues(t, 1, b.sweeps.Load())
		stopB()
	})
}

func TestAGatewayThatCannotReachTheBackendReleasesTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, blind := newStore(t), newFakeDriver()
		a, stopA := spawn(t, store, blind, "a")
		synctest.Wait()
		b, stopB := spawn(t, store, newFakeDriver(), "b")
		close(blind.events)
		time.Sleep(2 * time.Second)
		require.False(t, a.coordinator.IsHolder())
		require.True(t, b.coordinator.IsHolder())
		stopB()
		stopA()
	})
}

func TestAnExitIsRecordedOnlyForTheSandboxsOwnInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, driver := newStore(t), newFakeDriver()
		st := newSweepTest(t)
		st.sandboxes = sandboxes{store}
		for name, phase := range map[string]Phase{"ready": Ready, "deleting": Deleting, "again": Ready} {
			st.add(name, phase)
		}
		_, stop := spawn(t, store, driver, "a")
		for _, inst := range []Instance{
			{ID: "ready", Name: "ready", PID: 42},
			{ID: "deleting", Name: "deleting"},
			{ID: "earlier", Name: "again"}, // the sandbox has been created again since
			{ID: "nobody", Name: "nobody"},
		} {
			driver.set(Instance{ID: inst.Name, Name: inst.Name, CreatedAt: time.Now(), Alive: true}) // otherwise the sweep would record it
			driver.events <- Event{Exited, inst}
		}
		driver.events <- Event{Kind: Started} // once this is received, the others have been handled
		for name, want := range map[string]Phase{"ready": Error, "deleting": Deleting, "again": Ready} {
			require.Equal(t, want, st.phase(name), name)
		}
		sb, err := st.sandboxes.get(t.Context(), "ready")
		require.NoError(t, err)
		require.Equal(t, "process 42 exited", sb.Message)
		stop()
	})
}

func TestAnExitIsRecordedDespiteAConcurrentWrite(t *testing.T) {
	st := newSweepTest(t)
	sb := st.add("box", Ready)
	st.store.SetHook(before("put", func() error {
		st.store.SetHook(nil)
		_, err := st.sandboxes.ready(t.Context(), sb, 43)
		return err
	}))
	require.NoError(t, st.sandboxes.exited(t.Context(), Instance{ID: "box", Name: "box"}))
	require.Equal(t, Error, st.phase("box"))
}

func TestATermThatHasEndedDoesNotRecordAnExit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, driver := newStore(t), newFakeDriver()
		st := newSweepTest(t)
		st.sandboxes = sandboxes{store}
		sb := st.add("box", Ready)
		driver.set(Instance{ID: "box", Name: "box", CreatedAt: time.Now(), Alive: true}) // otherwise the sweep would record it
		_, stop := spawn(t, store, driver, "a")
		store.SetHook(before("put", func() error {
			store.SetHook(nil)
			return takeOver(t.Context(), store)
		}))
		driver.events <- Event{Exited, Instance{ID: "box", Name: "box"}}
		driver.events <- Event{Kind: Started} // taken: the other is done with
		got, err := st.sandboxes.get(t.Context(), "box")
		require.NoError(t, err)
		require.Equal(t, sb.Version, got.Version)
		stop()
	})
}
