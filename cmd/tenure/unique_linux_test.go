package main

import (
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
)

func TestAUniqueReplicaContinuesAtOnceAfterARestart(t *testing.T) {
	t.Parallel()
	eachStore(t, func(t *testing.T, s *site) {
		// Without the flag, the second start would take ten minutes. The program outlives tenure for some seconds.
		args := append([]string{"--unique-replica", "--ttl", "10m", "--stop-timeout", "4s"}, s.service(t, "stubborn", "child")...)
		first := s.start(t, "a", args...)
		s.awaitStart(t, 0)
		first.signal(t, syscall.SIGKILL)
		s.start(t, "a", args...)
		if next := s.awaitStart(t, 1); next.holder != "a" {
			t.Errorf("%s started it", next.holder)
		}
	})
}

func TestASecondRunOfAUniqueReplicaOnOneHostWaits(t *testing.T) {
	t.Parallel()
	s := sqliteSite(t)
	args := append([]string{"--unique-replica"}, s.service(t)...)
	first := s.start(t, "a", args...)
	s.awaitStart(t, 0)
	second := s.start(t, "a", args...)
	second.awaitLog(t, "another run of this replica is on this host")
	s.start(t, "b", args...).awaitLog(t, "msg=competing") // another name does not wait
	store := s.open(t)
	awaitRenewal(t, store)
	if events := s.events(t); len(events) != 1 {
		t.Errorf("there was %+v", events)
	}
	s.ask(t, "resign")
	if next := s.awaitStart(t, 1); next.holder != "b" {
		t.Errorf("%s started it", next.holder)
	}
	first.signal(t, syscall.SIGTERM)
	first.awaitExit(t)
	second.awaitLog(t, "msg=competing")
}

func TestAHostWithTheNameOfAnotherWaitsForItsLease(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, s *site) {
		s.ask(t, "migrate")
		store := s.open(t)
		// other is a host with the same name that takes the lease, and vanishes.
		other := func(term string, labels map[string]string) time.Time {
			t.Helper()
			_, err := store.PutIf(t.Context(), tenure.Object{
				Key: tenure.Key{Type: defaultType, ID: "svc"}, Name: "svc", Labels: labels,
				Payload: []byte(`{"holder":"a","term":"` + term + `","ttl_ms":3000}`),
			}, tenure.Unconditional())
			if err != nil {
				t.Fatal(err)
			}
			return time.Now()
		}
		const least = 2900 * time.Millisecond
		since := other("00000000-0000-0000-0000-000000000001", map[string]string{tenure.UniqueWithin: "other"})
		a := s.start(t, "a", append([]string{"--unique-replica"}, s.service(t)...)...)
		if next := s.awaitStart(t, 0); next.at.Sub(since) < least {
			t.Errorf("at its start it took the lease of the other after %v", next.at.Sub(since))
		}
		since = other("00000000-0000-0000-0000-000000000002", nil) // it may run without the flag
		if next := s.awaitStart(t, 1); next.at.Sub(since) < least {
			t.Errorf("it took the lease back after %v", next.at.Sub(since))
		}
		a.awaitLog(t, "lease lost")
	})
}
