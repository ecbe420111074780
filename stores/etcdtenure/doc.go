// Package etcdtenure keeps leases, and other objects, in etcd.
//
//	store, err := etcdtenure.Open(ctx, "etcd://host-a,host-b,host-c", clientv3.Config{}, etcdtenure.Config{})
//	err = store.Migrate(ctx)
//	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
//
// Everything else is as on any store of package tenure. An object's version, and with it a fencing token, is
// the cluster's revision at the object's last write. Every change is an event that wakes the standbys, so
// they read nothing while the holder renews. The store has no clock: a standby takes over when it has itself
// seen no change for the TTL, see [tenure.ExpiryObserved]. The store does not use etcd's own leases.
package etcdtenure
