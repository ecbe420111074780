package tenure

import (
	"fmt"
	"time"
)

// ObservedConfig returns the configs of a lease and of its coordinator in which
// no clock decides who may hold: the holder renews once per interval, and a
// standby that has itself watched it miss so many renewals takes over. So the TTL
// is interval × missed, missed being 2 or more. The job then begins after so many
// confirmations, each one interval. The caller sets what is left, the job first of
// all.
//
// [NewLease] refuses what comes of an interval or a number that cannot be. See
// [Observed]. That the wall clock of a holder jumps can only end its term early.
func ObservedConfig(interval time.Duration, missed, confirmations int) (LeaseConfig, CoordinatorConfig) {
	lease := LeaseConfig{TTL: interval * time.Duration(missed), Expiry: Observed}
	switch {
	case interval <= 0:
		lease.refused = fmt.Errorf("%w: ObservedConfig: interval %v is not positive", ErrInvalid, interval)
	case missed < 2:
		lease.refused = fmt.Errorf("%w: ObservedConfig: missed %d is not 2 or more", ErrInvalid, missed)
	case interval > maximumTTL/time.Duration(missed):
		lease.refused = fmt.Errorf("%w: ObservedConfig: interval %v × missed %d is more than %v", ErrInvalid, interval, missed, maximumTTL)
	}
	return lease, CoordinatorConfig{RenewInterval: interval, Confirmations: confirmations}
}
