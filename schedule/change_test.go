package schedule_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

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
