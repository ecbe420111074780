package schedule_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/schedule"
	"github.com/tenurelib/tenure/storetest"
)

// A deployment changes the plan at some hour of a day. The earlier slots of the new plan were not missed.
func TestAPlanThatChangesCountsFromThen(t *testing.T) {
	const day, week = 24 * time.Hour, 7 * 24 * time.Hour
	at := func(hour int) schedule.Plan { return schedule.Interval(day, time.Duration(hour)*time.Hour) }
	for name, c := range map[string]struct {
		missed   schedule.Missed
		old, new schedule.Plan
		until    time.Duration // the old plan runs
		down     time.Duration // then no replica runs
		want     []float64     // slots of the new plan, in the two days after it was deployed
	}{
		"later":                            {schedule.MissedRunLatest, at(1), at(2), 15 * time.Hour, 0, []float64{26, 50}},
		"earlier":                          {schedule.MissedRunLatest, at(3), at(2), 2*time.Hour + time.Minute, 0, []float64{26, 50}},
		"denser, each":                     {schedule.MissedRunEach, schedule.Interval(week, 0), schedule.Interval(day, 0), 30 * time.Hour, 0, []float64{48, 72}},
		"denser, and back":                 {schedule.MissedRunEach, at(1), schedule.Interval(12*time.Hour, time.Hour), 14 * time.Hour, 0, []float64{25, 37, 49, 61}},
		"a slot of both, missed meanwhile": {schedule.MissedRunLatest, at(1), schedule.Interval(12*time.Hour, time.Hour), 15 * time.Hour, 11 * time.Hour, []float64{25, 37, 49, 61, 73}},
		"the same, missed meanwhile":       {schedule.MissedRunEach, at(1), at(1), 15 * time.Hour, 35 * time.Hour, []float64{25, 49, 73, 97}},
		"the same, skipped":                {schedule.MissedSkip, at(1), at(1), 15 * time.Hour, 35 * time.Hour, []float64{73, 97}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store, ran, began := storetest.NewMem(), &slots{}, time.Now()
				stop := holdFor(t, 10*time.Minute, store, schedule.Config{Plan: c.old, Do: ran.Do, Missed: c.missed})
				time.Sleep(c.until)
				stop()
				ran.take(began)
				time.Sleep(c.down)
				holdFor(t, 10*time.Minute, store, schedule.Config{Plan: c.new, Do: ran.Do, Missed: c.missed})
				time.Sleep(2 * day)
				require.Equal(t, c.want, ran.take(began))
			})
		})
	}
}

// Ten times in the year a deployment changes the plan, first of one of two replicas. Until the other one follows, either may
// hold the lease. Each slot of the plan in force runs once, and none runs that was over when its plan came.
func TestAYearInWhichThePlanChangesTenTimes(t *testing.T) {
	testkit.Slow(t)
	const ttl, changes = 15 * time.Minute, 10
	for _, zone := range []string{"Europe/Berlin", "America/New_York", "America/Santiago", "Australia/Lord_Howe", "Asia/Kolkata"} {
		t.Run(zone, func(t *testing.T) {
			location, err := time.LoadLocation(zone)
			require.NoError(t, err)
			synctest.Test(t, func(t *testing.T) {
				store, random, ran := storetest.NewMem(), rand.New(rand.NewPCG(7, uint64(len(zone)))), map[int64]int{}
				var mu sync.Mutex
				do := func(_ context.Context, slot schedule.Slot) error {
					mu.Lock()
					defer mu.Unlock()
					ran[slot.Time.Unix()]++
					if late := time.Since(slot.Time); late > time.Hour {
						t.Errorf("%v ran %v later", slot.Time, late)
					}
					return nil
				}
				start := func(plan schedule.Plan) (stop func()) {
					return holdFor(t, ttl, store, schedule.Config{Plan: plan, Location: location, Do: do, Missed: schedule.MissedRunEach})
				}
				somePlan := func() schedule.Plan {
					hour, minute := random.IntN(4), 15*random.IntN(4) // where clocks change
					return []schedule.Plan{
						schedule.Daily(hour, minute),
						schedule.Weekly(time.Weekday(random.IntN(7)), hour, minute),
						schedule.Interval(6*time.Hour, time.Duration(minute)*time.Minute),
						schedule.Interval(24*time.Hour, time.Duration(hour)*time.Hour),
					}[random.IntN(4)]
				}
				length := time.Duration(*days) * 24 * time.Hour
				pause := func(most time.Duration) { time.Sleep(time.Minute + time.Duration(random.Int64N(int64(most)))) }
				// expect checks that the slots that all of the plans have, and nothing else, run while until returns. At either end, a
				// handover may be under way.
				expect := func(plans []schedule.Plan, until func()) {
					began := time.Now().Add(2 * time.Minute)
					until()
					mu.Lock()
					defer mu.Unlock()
					has := func(plan schedule.Plan, at time.Time) bool { return plan.Next(at.Add(-1).In(location)).Equal(at) }
					for at := plans[0].Next(began.In(location)); at.Before(time.Now().Add(-2 * time.Minute)); at = plans[0].Next(at.In(location)) {
						if len(plans) == 1 || has(plans[1], at) {
							require.Equal(t, 1, ran[at.Unix()], "%v: runs", at)
						}
					}
				}
				plan := somePlan()
				a, b := start(plan), start(plan)
				for range changes {
					expect([]schedule.Plan{plan}, func() { pause(length / changes) })
					next := somePlan()
					b()
					b = start(next)
					expect([]schedule.Plan{plan, next}, func() {
						for range random.IntN(4) { // the old plan and the new one take turns
							pause(6 * time.Hour)
							a()
							a = start(plan)
							pause(6 * time.Hour)
							b()
							b = start(next)
						}
					})
					a()
					a, plan = start(next), next
				}
				expect([]schedule.Plan{plan}, func() { pause(length / changes) })
				a()
				b()
				for slot, times := range ran {
					require.Equal(t, 1, times, "%v: runs", time.Unix(slot, 0).In(location))
				}
				t.Logf("%d slots", len(ran))
			})
		})
	}
}
