package tenure

import "time"

// ObservedConfig returns the configs of a lease and of its coordinator in which
// no clock decides who may hold: the holder renews once per interval, and a
// standby that has itself watched it miss so many renewals takes over. So the TTL
// is interval × missed, missed being 2 or more. The job then begins after so many
// confirmations, each one interval. The caller sets what is left, the job first of
// all.
//
// See [Observed]. That the wall clock of a holder jumps can only end its term early.
func ObservedConfig(interval time.Duration, missed, confirmations int) (LeaseConfig, CoordinatorConfig) {
	return LeaseConfig{TTL: interval * time.Duration(missed), Expiry: Observed},
		CoordinatorConfig{RenewInterval: interval, Confirmations: confirmations}
}
