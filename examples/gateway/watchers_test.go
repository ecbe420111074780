//go:build unix

package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

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
	if err != nil {
		t.Fatal(err)
	}
	stop = func() {
		cancel()
		<-w.stopped
		if w.err != nil {
			t.Error(w.err)
		}
	}
	t.Cleanup(stop)
	return w, stop
}

func TestOnlyTheHolderSweepsAndAStoppedOneIsReplacedWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, driver := newStore(), newFakeDriver()
		a, stopA := spawn(t, store, driver, "a")
		synctest.Wait()
		b, stopB := spawn(t, store, driver, "b")
		time.Sleep(10*time.Minute + time.Second)
		if got, want := a.sweeps.Load(), int64(11); got != want {
			t.Errorf("the holder swept %d times, want %d", got, want)
		}
		if got := b.sweeps.Load(); got != 0 {
			t.Errorf("the standby swept %d times", got)
		}
		stopA()
		time.Sleep(time.Second)
		if !b.coordinator.IsHolder() || b.sweeps.Load() != 1 {
			t.Errorf("a second later b is holder: %v, and swept %d times", b.coordinator.IsHolder(), b.sweeps.Load())
		}
		stopB()
	})
}

func TestAGatewayThatCannotReachTheBackendReleasesTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, blind := newStore(), newFakeDriver()
		a, stopA := spawn(t, store, blind, "a")
		synctest.Wait()
		b, stopB := spawn(t, store, newFakeDriver(), "b")
		close(blind.events)
		time.Sleep(2 * time.Second)
		if a.coordinator.IsHolder() || !b.coordinator.IsHolder() {
			t.Errorf("is holder: a %v, b %v; want b", a.coordinator.IsHolder(), b.coordinator.IsHolder())
		}
		stopB()
		stopA()
	})
}

func TestAnExitIsRecordedOnlyForTheSandboxsOwnInstance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, driver := newStore(), newFakeDriver()
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
			if got := st.phase(name); got != want {
				t.Errorf("the sandbox %s is %s, want %s", name, got, want)
			}
		}
		if sb, err := st.sandboxes.get(t.Context(), "ready"); err != nil || sb.Message != "process 42 exited" {
			t.Errorf("its message is %q, %v", sb.Message, err)
		}
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
	if err := st.sandboxes.exited(t.Context(), Instance{ID: "box", Name: "box"}); err != nil {
		t.Fatal(err)
	}
	if got := st.phase("box"); got != Error {
		t.Errorf("the sandbox is %s, want %s", got, Error)
	}
}

func TestATermThatHasEndedDoesNotRecordAnExit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, driver := newStore(), newFakeDriver()
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
		driver.events <- Event{Kind: Started} // once this is received, the other has been handled
		if got, err := st.sandboxes.get(t.Context(), "box"); err != nil || got.Version != sb.Version {
			t.Errorf("the record is %+v, %v, want it unchanged, %+v", got, err, sb)
		}
		stop()
	})
}
