//go:build unix

package main

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
)

// spawn starts a gateway's watchers, and stops them at the end of the test.
func spawn(t *testing.T, store tenure.Store, driver Driver, replica string) (w *watchers, stop func()) {
	t.Helper()
	w, err := newWatchers(store, driver, config{replica: replica, ttl: 30 * time.Second, sweep: time.Minute, grace: testGrace})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	returned := make(chan error, 1)
	go func() { returned <- w.coordinator.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-returned)
	})
	t.Cleanup(stop)
	return w, stop
}

func TestAGatewayThatCannotReachTheBackendReleasesTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, blind := newStore(t), newFakeDriver()
		a, stopA := spawn(t, store, blind, "a")
		synctest.Wait()
		b, stopB := spawn(t, store, newFakeDriver(), "b")
		close(blind.exits)
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
		for name, phase := range map[string]Phase{"new": Provisioning, "ready": Ready, "deleting": Deleting, "again": Ready} {
			st.add(name, phase)
		}
		_, stop := spawn(t, store, driver, "a")
		for _, inst := range []Instance{
			{ID: "new", Sandbox: "new"},
			{ID: "ready", Sandbox: "ready", PID: 42},
			{ID: "deleting", Sandbox: "deleting"},
			{ID: "earlier", Sandbox: "again"}, // the sandbox has been created again since
			{ID: "nobody", Sandbox: "nobody"},
		} {
			driver.set(Instance{ID: inst.Sandbox, CreatedAt: time.Now(), Alive: true}) // otherwise the sweep would record it
			driver.exits <- inst
		}
		driver.exits <- Instance{Sandbox: "nobody"} // once this is received, the others have been handled
		for name, want := range map[string]Phase{"new": Error, "ready": Error, "deleting": Deleting, "again": Ready} {
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
	require.NoError(t, st.sandboxes.exited(t.Context(), Instance{ID: "box", Sandbox: "box"}))
	require.Equal(t, Error, st.phase("box"))
}

func TestATermThatHasEndedDoesNotRecordAnExit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, driver := newStore(t), newFakeDriver()
		st := newSweepTest(t)
		st.sandboxes = sandboxes{store}
		sb := st.add("box", Ready)
		driver.set(Instance{ID: "box", CreatedAt: time.Now(), Alive: true}) // otherwise the sweep would record it
		_, stop := spawn(t, store, driver, "a")
		store.SetHook(before("put", func() error {
			store.SetHook(nil)
			return takeOver(t.Context(), store)
		}))
		driver.exits <- Instance{ID: "box", Sandbox: "box"}
		driver.exits <- Instance{Sandbox: "nobody"} // once this is received, the other has been handled
		got, err := st.sandboxes.get(t.Context(), "box")
		require.NoError(t, err)
		require.Equal(t, sb.Version, got.Version)
		stop()
	})
}
