// Package natstenure keeps leases, and other objects, in a stream of NATS JetStream.
//
//	js, err := jetstream.New(nc) // a connection of the caller's
//	store, err := natstenure.New(js, natstenure.Config{SyncAlways: true})
//	err = store.Migrate(ctx)
//	lease, err := tenure.NewLease(store, tenure.LeaseConfig{})
//
// Everything else is as on any store of package tenure. An object's version, and with it a
// fencing token, is the sequence of its last message. Every change is an event, so standbys are
// woken by it and read nothing while the holder renews. The store has no clock: a standby takes
// over when it has itself seen no change for the TTL, see [tenure.Observed].
package natstenure
