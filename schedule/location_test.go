package schedule_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	_ "time/tzdata" // not every host has the zones

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/schedule"
	"github.com/tenurelib/tenure/storetest"
)

// on is a store as a host with that time zone sees it.
type on struct {
	tenure.Store
	zone *time.Location
}

func (s on) Get(ctx context.Context, key tenure.Key) (tenure.Object, error) {
	obj, err := s.Store.Get(ctx, key)
	return s.local(obj), err
}

func (s on) PutIf(ctx context.Context, obj tenure.Object, cond tenure.WriteCondition) (tenure.Object, error) {
	obj, err := s.Store.PutIf(ctx, obj, cond)
	return s.local(obj), err
}

func (s on) Fence(guard tenure.Guard) (tenure.Store, error) {
	store, err := tenure.Fence(s.Store, guard)
	return on{store, s.zone}, err
}

func (s on) local(obj tenure.Object) tenure.Object {
	obj.CreatedAt, obj.UpdatedAt = obj.CreatedAt.In(s.zone), obj.UpdatedAt.In(s.zone)
	return obj
}

// daily is due at three o'clock, by the clock of the time that it is given, as a cron
// expression without a time zone is.
var daily = planFunc(func(after time.Time) time.Time {
	year, month, day := after.Date()
	slot := time.Date(year, month, day, 3, 0, 0, 0, after.Location())
	if !slot.After(after) {
		slot = time.Date(year, month, day+1, 3, 0, 0, 0, after.Location())
	}
	return slot
})

func zone(t *testing.T, name string) *time.Location {
	t.Helper()
	location, err := time.LoadLocation(name)
	require.NoError(t, err)
	return location
}

// Handovers and failed slots make the plan be asked about times of the record, of the store
// and of both hosts.
func TestASlotIsAtTheSameTimeAllYearWhateverTheHostsTimeZones(t *testing.T) {
	testkit.Slow(t)
	for name, location := range map[string]*time.Location{
		"the default": nil, "Europe/London": zone(t, "Europe/London"), "America/New_York": zone(t, "America/New_York"),
		"Australia/Lord_Howe": zone(t, "Australia/Lord_Howe"), "Pacific/Auckland": zone(t, "Pacific/Auckland"), "Asia/Kolkata": zone(t, "Asia/Kolkata"),
	} {
		for _, missed := range []schedule.Missed{schedule.MissedRunLatest, schedule.MissedRunEach} {
			synctest.Test(t, func(t *testing.T) {
				store, began := storetest.NewMem(), time.Now()
				hosts := []on{{store, zone(t, "America/Los_Angeles")}, {store, zone(t, "Europe/Berlin")}, {store, time.FixedZone("", 3600)}}
				in := time.UTC
				if location != nil {
					in = location
				}
				due, fails := daily(began.In(in)), false
				do := func(_ context.Context, slot schedule.Slot) error {
					if fails = !fails; fails {
						return fmt.Errorf("the first attempt at each slot fails")
					}
					require.Equal(t, due, slot.Time, "%s, missed: %d", name, missed)
					due = daily(due)
					return nil
				}
				for i := 0; time.Since(began) < 366*24*time.Hour; i++ { // the hosts take turns at any time of the day
					stop := holdFor(t, 12*time.Hour, hosts[i%len(hosts)], schedule.Config{Plan: daily, Location: location, Do: do, Missed: missed})
					time.Sleep(41 * time.Minute)
					stop()
					time.Sleep(6 * time.Hour)
				}
				require.WithinDuration(t, time.Now(), due, 24*time.Hour, "%s, missed: %d: slots are missing", name, missed)
			})
		}
	}
}

// replicaIn is a replica whose config names that location.
func replicaIn(t *testing.T, store tenure.Store, location *time.Location, ran *slots) (log *bytes.Buffer, stop func()) {
	t.Helper()
	log = new(bytes.Buffer)
	return log, holdLogging(t, slog.New(slog.NewTextHandler(log, nil)), 15*time.Second, store, schedule.Config{Plan: daily, Location: location, Do: ran.Do})
}

func TestReplicasWithDifferentLocationsGoByThatOfTheRecord(t *testing.T) {
	testkit.Slow(t)
	synctest.Test(t, func(t *testing.T) {
		store, ran, began := storetest.NewMem(), &slots{}, time.Now()
		kolkata := zone(t, "Asia/Kolkata") // there it is 03:00 at 21:30 UTC
		for i, location := range []*time.Location{kolkata, nil, kolkata, zone(t, "Pacific/Auckland")} {
			log, stop := replicaIn(t, store, location, ran)
			time.Sleep(24 * time.Hour)
			stop()
			told := 0
			if location != kolkata {
				told = 1
			}
			require.Equal(t, told, strings.Count(log.String(), "schedule uses the location in which it was begun"), "replica %d: %s", i, log)
		}
		require.Equal(t, []float64{21.5, 45.5, 69.5, 93.5}, ran.take(began))
	})
}

// An earlier version gave its plan times in the host's time zone, and kept them so.
func TestARecordOfAnEarlierVersionGetsTheLocationOfTheFirstThatRunsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, ran, began := storetest.NewMem(), &slots{}, time.Now()
		berlin := zone(t, "Europe/Berlin")
		_, err := store.PutIf(t.Context(), tenure.Object{Key: key, Payload: []byte(`{"done":"1999-12-31T03:00:00+01:00"}`)}, tenure.IfAbsent())
		require.NoError(t, err)
		state, err := schedule.ReadState(t.Context(), store, key)
		require.NoError(t, err)
		require.Empty(t, state.Location)

		_, stop := replicaIn(t, store, berlin, ran) // it runs no slot before the next one stands by
		time.Sleep(time.Hour)
		stop()
		log, stop := replicaIn(t, store, nil, ran)
		time.Sleep(3 * time.Hour)
		stop()
		require.Equal(t, []float64{2}, ran.take(began), log.String())
		state, err = schedule.ReadState(t.Context(), store, key)
		require.NoError(t, err)
		require.Equal(t, "Europe/Berlin", state.Location)
		require.Equal(t, began.Add(2*time.Hour).UTC(), state.Done)
	})
}

func TestALocationThatCannotBeLoadedEndsTheJob(t *testing.T) {
	testkit.Slow(t)
	synctest.Test(t, func(t *testing.T) {
		store, ran := storetest.NewMem(), &slots{}
		_, stop := replicaIn(t, store, time.FixedZone("the office", 3600), ran)
		time.Sleep(3 * time.Hour)
		stop()
		require.Len(t, ran.take(time.Now()), 1)
		log, stop := replicaIn(t, store, nil, ran)
		time.Sleep(24 * time.Hour)
		stop()
		require.Empty(t, ran.take(time.Now()))
		require.Contains(t, log.String(), `the schedule was begun in \"the office\"`)
	})
}

// The test runs itself on hosts that give time.Local other names: its name is that of TZ, or UTC if there is none.
func TestNewRefusesTheHostsTimeZoneAndNotTheSameZoneByItsName(t *testing.T) {
	cfg := schedule.Config{Store: storetest.NewMem(), Key: key, Plan: daily, Do: new(slots).Do}
	for _, location := range []*time.Location{nil, time.UTC, zone(t, "Europe/Berlin"), zone(t, "America/New_York")} {
		cfg.Location = location
		_, err := schedule.New(cfg)
		require.NoError(t, err, "TZ=%s, %s", os.Getenv("TZ"), location)
	}
	host := time.Local
	defer func() { time.Local = host }()
	cfg.Location = host
	_, err := schedule.New(cfg)
	require.ErrorIs(t, err, tenure.ErrInvalid, "TZ=%s", os.Getenv("TZ"))
	time.Local = zone(t, "Europe/Berlin") // by the program, so in all replicas
	cfg.Location = time.Local
	_, err = schedule.New(cfg)
	require.NoError(t, err)
	if os.Getenv("TENURE_TEST_ZONE") != "" {
		return
	}
	for _, tz := range []string{"TZ=", "TZ=UTC", "TZ=Europe/Berlin", "TZ=:Europe/Berlin", "TZ=no such zone"} {
		other := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
		other.Env = append(os.Environ(), "TENURE_TEST_ZONE=1", tz)
		out, err := other.CombinedOutput()
		require.NoError(t, err, "%s: %s", tz, out)
	}
}
