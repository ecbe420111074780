package sim

import (
	"context"
	"errors"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

var errUnfit = errors.New("the disk is full")

// check is the replica's Check.
func (l *life) check(ctx context.Context, role tenure.Role) error {
	if !l.halt() {
		return errCrashed
	}
	unfit := ""
	l.r.w.locked(func() { unfit = l.r.unfit })
	err := errUnfit
	switch {
	case unfit == "":
		err = nil
	case unfit == "hangs":
		<-ctx.Done()
		err = ctx.Err()
	case unfit == "deaf":
		l.wait(context.WithoutCancel(ctx), l.r.ttl/8+l.r.dice.UpTo(l.r.ttl/8))
	}
	l.r.w.locked(func() { l.unchecked = err != nil })
	return err
}

// sent is called before each call is sent.
func (j *judge) sent(ctx context.Context, l *life, call storetest.Call) {
	if call.Op == "put" && call.Key == leaseKey && ctx.Value(runKey{}) != nil && ctx.Err() == nil && !isOffer(call.Object) &&
		l.coordinator.Status().Role == tenure.RoleStandby {
		j.mayTake(l, "competes or asks for the lease")
	}
	if !j.w.checks || !l.unchecked || call.Key != leaseKey || call.Op != "put" || isRequest(call.Object) || isOffer(call.Object) {
		return
	}
	if l.coordinator.Status().Role == tenure.RoleStandby {
		j.violated("check", "%s competes for the lease although it is not fit", l.r.name)
	}
	// At the instant at which the job is told to return, a renewal is sent that keeps
	// the lease until it has returned.
	if t := l.newest; t != nil && t.valid != nil && t.told.IsZero() {
		j.w.later(time.Millisecond, func() {
			j.w.locked(func() {
				if t.told.IsZero() && t.running > 0 && !l.dead() {
					j.violated("check", "%s renews although it is not fit", l.r.name)
				}
			})
		})
	}
}

// fencePredecessor is the replica's FencePredecessor; it fails occasionally.
func (l *life) fencePredecessor(ctx context.Context, prev tenure.Holding) error {
	if !l.halt() {
		return errCrashed
	}
	if l.r.dice.One(3) {
		return errors.New("the power switch does not answer")
	}
	if !l.wait(ctx, l.r.dice.UpTo(l.r.ttl/10)) {
		return ctx.Err()
	}
	l.r.w.line.Say(l.r.name, "has cut off %s", prev.Holder)
	l.r.w.locked(func() { l.r.w.judge.terms[tenure.TermFromContext(ctx).ID()].cutOff = true })
	return nil
}

// wait waits like a process that may be paused or crash. It returns false if the
// context or the process ended first.
func (l *life) wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return l.halt()
	case <-ctx.Done():
		l.halt()
		return false
	case <-l.gone:
		return false
	}
}
