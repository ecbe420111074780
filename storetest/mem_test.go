package storetest_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

var key = tenure.Key{Type: "sandbox", ID: "a"}

func TestMemKeepsTheContract(t *testing.T) {
	storetest.Run(t, func(*testing.T) tenure.Store { return storetest.NewMem() })
	t.Run("with lineages", func(t *testing.T) {
		storetest.Run(t, func(*testing.T) tenure.Store {
			mem := storetest.NewMem()
			mem.Lineages = true
			return mem
		})
	})
}

func TestMemWithEventsKeepsTheContract(t *testing.T) {
	storetest.Run(t, func(*testing.T) tenure.Store {
		m := storetest.NewMem()
		m.Events = true
		return m
	})
}

func TestMemsVersionsRiseAlthoughItsClockIsSetBack(t *testing.T) {
	store := storetest.NewMem()
	now := time.Now()
	store.Now = func() time.Time { return now }
	var last int64
	for range 3 {
		obj := create(t, store)
		if obj.Version <= last {
			t.Errorf("version: got %d after %d", obj.Version, last)
		}
		last = obj.Version
		if err := store.DeleteIf(t.Context(), key, tenure.IfVersion(last)); err != nil {
			t.Fatal(err)
		}
		now = now.Add(-time.Hour)
	}
}

func TestMemsAgesFollowAJumpOfItsClock(t *testing.T) {
	for _, jump := range []time.Duration{time.Hour, -time.Hour} {
		store := storetest.NewMem()
		now := time.Now()
		store.Now = func() time.Time { return now }
		create(t, store)
		now = now.Add(jump)
		obj, err := store.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := obj.Age, jump; got != want {
			t.Errorf("age: got %v, want %v", got, want)
		}
	}
}

func TestMemWorksInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		create(t, store)
		time.Sleep(time.Hour)
		obj, err := store.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := obj.Age, time.Hour; got != want {
			t.Errorf("age: got %v, want %v", got, want)
		}
	})
}

func create(t *testing.T, store tenure.Store) tenure.Object {
	t.Helper()
	obj, err := store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfAbsent())
	if err != nil {
		t.Fatal(err)
	}
	return obj
}
