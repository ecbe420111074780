package schedule

import (
	"fmt"
	"time"
)

// Plan names the times at which a job is due, its slots. The schedules of
// github.com/robfig/cron/v3 are plans. An expression without CRON_TZ is about the clock of
// the [Config]'s Location.
type Plan interface {
	// Next returns the first slot after a time, or the zero time if there is none. The time
	// is in the [Config]'s Location, never in that of the host.
	Next(after time.Time) time.Time
}

// located is a plan that gets all times in one location.
type located struct {
	plan     Plan
	location *time.Location
}

func (p located) Next(after time.Time) time.Time { return p.plan.Next(after.In(p.location)) }

// Interval returns the plan whose slots are all multiples of an interval, plus a phase,
// since midnight UTC on 1 January 1970. So Interval(24*time.Hour, 3*time.Hour) is daily at
// 03:00 UTC, whenever the program was started. It panics if the interval is not positive.
func Interval(interval, phase time.Duration) Plan {
	if interval <= 0 {
		panic(fmt.Sprintf("schedule: Interval: interval %v is not positive", interval))
	}
	return every{interval, phase}
}

type every struct{ interval, phase time.Duration }

func (p every) Next(after time.Time) time.Time {
	// Not Truncate, which counts from the year 1, a Monday: a week would begin then.
	epoch := time.Unix(0, 0).Add(p.phase)
	since := after.Sub(epoch)
	n := since / p.interval
	if since < 0 && since%p.interval != 0 {
		n--
	}
	return epoch.Add((n + 1) * p.interval).UTC()
}

// latest returns the last slot of a plan after one time and not after another, or the
// zero time if there is none.
func latest(plan Plan, after, now time.Time) (time.Time, error) {
	// Search backwards from now in growing steps, because there may be a million slots in
	// between.
	for back := time.Second; ; back *= 2 {
		from := now.Add(-back)
		begin := !from.After(after) || back > now.Sub(after)
		if begin {
			from = after
		}
		slot, err := next(plan, from)
		if err != nil {
			return time.Time{}, err
		}
		if slot.IsZero() || slot.After(now) {
			if begin {
				return time.Time{}, nil
			}
			continue
		}
		for {
			later, err := next(plan, slot)
			if err != nil || later.IsZero() || later.After(now) {
				return slot, err
			}
			slot = later
		}
	}
}

// next is plan.Next, checked.
func next(plan Plan, after time.Time) (time.Time, error) {
	slot := plan.Next(after)
	if !slot.IsZero() && !slot.After(after) {
		return time.Time{}, fmt.Errorf("schedule: the plan's Next(%v) is %v, which is not later", after, slot)
	}
	return slot, nil
}
