// Package natstenure keeps leases, and other objects, in a stream of NATS JetStream, or in a
// key-value bucket: see [Config].
//
//	store, err := natstenure.Open(ctx, "nats://host-a,host-b,host-c", natstenure.Config{Replicas: 3, SyncAlways: true})
//	err = store.Migrate(ctx)
//	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
//
// Everything else is as on any store of package tenure. An object's version, and with it a fencing token, is the
// sequence of its last message. Every change is an event that wakes the standbys, so they read nothing while the
// holder renews. The store has no clock: a standby takes over when it has itself seen no change for the TTL, see
// [tenure.ExpiryObserved].
package natstenure
