package storetest_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

type doFunc = func(context.Context) error

func TestFaultyWithoutFaultsKeepsTheContract(t *testing.T) {
	for name, hook := range map[string]storetest.Hook{
		"no hook":                             nil,
		"a hook that returns the error of do": func(ctx context.Context, _ storetest.Call, do doFunc) error { return do(ctx) },
		"a hook that calls do and returns nil": func(ctx context.Context, _ storetest.Call, do doFunc) error {
			do(ctx)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(*testing.T) tenure.Store { return storetest.Faulty(storetest.NewMem(), hook) })
		})
	}
}

func TestFaultyWritesIfTheHookLosesTheAnswer(t *testing.T) {
	lost := errors.New("connection reset")
	store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do doFunc) error {
		if call.Op == "put" {
			do(ctx)
			return lost
		}
		return do(ctx)
	})
	if _, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent()); !errors.Is(err, lost) {
		t.Errorf("PutIf: got error %v, want %v", err, lost)
	}
	if _, err := store.Get(t.Context(), key); err != nil {
		t.Errorf("Get after an answer was lost: got error %v, want none", err)
	}
}

func TestFaultyWritesNothingIfTheHookLosesTheRequest(t *testing.T) {
	lost := errors.New("connection refused")
	store := storetest.Faulty(storetest.NewMem(), func(context.Context, storetest.Call, doFunc) error { return lost })
	if _, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent()); !errors.Is(err, lost) {
		t.Errorf("PutIf: got error %v, want %v", err, lost)
	}
	store.SetHook(nil)
	if _, err := store.Get(t.Context(), key); !errors.Is(err, tenure.ErrNotFound) {
		t.Errorf("Get after a request was lost: got error %v, want ErrNotFound", err)
	}
}

func TestFaultyHangsUntilTheContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, _ storetest.Call, _ doFunc) error {
			<-ctx.Done()
			return ctx.Err()
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		if _, err := store.Get(ctx, key); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Get: got error %v, want %v", err, context.DeadlineExceeded)
		}
		if got, want := time.Since(start), time.Minute; got != want {
			t.Errorf("the call took %v, want %v", got, want)
		}
	})
}

func TestADelayedFaultyWriteLandsAfterItsCallerGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, _ storetest.Call, do doFunc) error {
			go func() {
				time.Sleep(time.Hour)
				do(context.WithoutCancel(ctx))
			}()
			<-ctx.Done()
			return ctx.Err()
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		obj := tenure.Object{Key: key, Payload: []byte("payload")}
		if _, err := store.PutIf(ctx, obj, tenure.IfAbsent()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("PutIf: got error %v, want %v", err, context.DeadlineExceeded)
		}
		obj.Payload[0] = 'X' // the caller may modify it again

		store.SetHook(nil)
		if _, err := store.Get(t.Context(), key); !errors.Is(err, tenure.ErrNotFound) {
			t.Errorf("Get before the write has landed: got error %v, want ErrNotFound", err)
		}
		time.Sleep(2 * time.Hour)
		got, err := store.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := string(got.Payload), "payload"; got != want {
			t.Errorf("payload: got %q, want %q", got, want)
		}
	})
}

func TestAFaultyHookSeesTheCall(t *testing.T) {
	var got storetest.Call
	store := storetest.Faulty(storetest.NewMem(), func(ctx context.Context, call storetest.Call, do doFunc) error {
		got = call
		return do(ctx)
	})
	obj := tenure.Object{Key: key, Name: "name"}
	store.PutIf(t.Context(), obj, tenure.IfVersion(7))
	if got.Op != "put" || got.Key != key || got.Object.Name != obj.Name || got.Condition != tenure.IfVersion(7) {
		t.Errorf("a put: got call %+v", got)
	}
	store.DeleteIf(t.Context(), key, tenure.IfVersion(7))
	if got.Op != "delete" || got.Key != key || got.Condition != tenure.IfVersion(7) {
		t.Errorf("a delete: got call %+v", got)
	}
	got = storetest.Call{}
	store.DeleteAndWake(t.Context(), key, tenure.IfVersion(8))
	if got.Op != "delete" || got.Key != key || got.Condition != tenure.IfVersion(8) {
		t.Errorf("a delete that wakes: got call %+v", got)
	}
	store.Get(t.Context(), key)
	if got.Op != "get" || got.Key != key {
		t.Errorf("a get: got call %+v", got)
	}
	store.List(t.Context(), key.Type, "", 1)
	if got.Op != "list" || got.Key.Type != key.Type {
		t.Errorf("a list: got call %+v", got)
	}
}

func TestFaultyListIsUnsupportedIfItsStoreIsNotALister(t *testing.T) {
	inner := struct{ tenure.Store }{storetest.NewMem()} // hides List
	store := storetest.Faulty(inner, nil)
	if _, err := store.List(t.Context(), key.Type, "", 1); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("List: got error %v, want %v", err, errors.ErrUnsupported)
	}
}

// woken receives a pending hint and reports whether there was one.
func woken(watch tenure.Subscription) bool {
	select {
	case <-watch.C():
		return true
	default:
		return false
	}
}

func TestFaultyWakesIfAndOnlyIfItsStoreDeleted(t *testing.T) {
	lost := errors.New("connection reset")
	for what, trial := range map[string]struct {
		hook    storetest.Hook
		want    error
		deletes bool
	}{
		"no hook":          {nil, nil, true},
		"the request lost": {func(context.Context, storetest.Call, doFunc) error { return lost }, lost, false},
		"the answer lost":  {func(ctx context.Context, _ storetest.Call, do doFunc) error { do(ctx); return lost }, lost, true},
	} {
		mem := storetest.NewMem()
		store := storetest.Faulty(mem, nil)
		obj := create(t, store)
		through, beside := store.Watch(key), mem.Watch(key)
		if !through.Live() {
			t.Errorf("%s: the watch is not live, but the store's is", what)
		}
		store.SetHook(trial.hook)
		if err := store.DeleteAndWake(t.Context(), key, tenure.IfVersion(obj.Version)); !errors.Is(err, trial.want) {
			t.Errorf("%s: got error %v, want %v", what, err, trial.want)
		}
		if _, err := mem.Get(t.Context(), key); (err != nil) != trial.deletes {
			t.Errorf("%s: Get: got error %v, want one: %v", what, err, trial.deletes)
		}
		for _, watch := range []tenure.Subscription{through, beside} {
			if got := woken(watch); got != trial.deletes {
				t.Errorf("%s: woken %v, want %v", what, got, trial.deletes)
			}
			watch.Stop()
		}
	}
}

func TestADelayedFaultyDeletionWakesWhenItLands(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.Faulty(storetest.NewMem(), nil)
		obj := create(t, store)
		watch := store.Watch(key)
		store.SetHook(func(ctx context.Context, _ storetest.Call, do doFunc) error {
			go func() {
				time.Sleep(time.Hour)
				do(context.WithoutCancel(ctx))
			}()
			<-ctx.Done()
			return ctx.Err()
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := store.DeleteAndWake(ctx, key, tenure.IfVersion(obj.Version)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("DeleteAndWake: got error %v, want %v", err, context.DeadlineExceeded)
		}
		if woken(watch) {
			t.Error("woken before the deletion has landed")
		}
		time.Sleep(2 * time.Hour)
		if !woken(watch) {
			t.Error("not woken when the deletion landed")
		}
	})
}

// A watch does no I/O that a hook could make fail.
func TestAFaultyWatchBypassesTheHook(t *testing.T) {
	mem := storetest.NewMem()
	store := storetest.Faulty(mem, func(_ context.Context, call storetest.Call, _ doFunc) error {
		t.Errorf("the hook was called for a watch: %+v", call)
		return errors.New("refused")
	})
	obj := create(t, mem)
	watch := store.Watch(key)
	if err := mem.DeleteAndWake(t.Context(), key, tenure.IfVersion(obj.Version)); err != nil {
		t.Fatal(err)
	}
	if !watch.Live() || !woken(watch) {
		t.Error("a watch of the faulty store is not live, or was not woken")
	}
	watch.Stop()
	watch.Stop()
}

func TestFaultyDeletesAndWakesNobodyIfItsStoreIsNotAWatcher(t *testing.T) {
	inner := struct{ tenure.Store }{storetest.NewMem()} // hides Watch and DeleteAndWake
	calls := 0
	store := storetest.Faulty(inner, func(ctx context.Context, call storetest.Call, do doFunc) error {
		if call.Op == "delete" {
			calls++
		}
		return do(ctx)
	})
	watch := store.Watch(key)
	obj := create(t, store)
	if err := store.DeleteAndWake(t.Context(), key, tenure.IfVersion(obj.Version+1)); !errors.Is(err, tenure.ErrConflict) {
		t.Errorf("DeleteAndWake at another version: got error %v, want %v", err, tenure.ErrConflict)
	}
	if err := store.DeleteAndWake(t.Context(), key, tenure.IfVersion(obj.Version)); err != nil {
		t.Errorf("DeleteAndWake: got error %v, want none", err)
	}
	if _, err := store.Get(t.Context(), key); !errors.Is(err, tenure.ErrNotFound) {
		t.Errorf("Get after it: got error %v, want %v", err, tenure.ErrNotFound)
	}
	if calls != 2 {
		t.Errorf("the hook saw %d deletions, want 2", calls)
	}
	if watch.Live() || woken(watch) {
		t.Error("a watch of a store that gives no hints is live, or was woken")
	}
	watch.Stop()
	watch.Stop()
}

func TestTheExampleJobAddsEachOrderOnce(t *testing.T) { testAddUp(t) }
