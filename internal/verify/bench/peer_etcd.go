package main

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

var etcdPeer = peer{
	name:  "etcd",
	about: "concurrency.Election of etcd, one node, on disk, in this process",
	on:    onEtcd,
	// The server picks up a new watch of past events within 100 ms.
	settles: 120 * time.Millisecond,
	expires: true,
	open: func(ctx context.Context, o options) (replica, error) {
		client, err := clientv3.New(clientv3.Config{
			Endpoints:   []string{o.url},
			DialTimeout: 5 * time.Second,
			Logger:      zap.NewNop(),
		})
		if err != nil {
			return nil, err
		}
		var opts []concurrency.SessionOption
		switch o.timing {
		case fast:
			opts = append(opts, concurrency.WithTTL(3))
		case endless:
			opts = append(opts, concurrency.WithTTL(3600))
		}
		session, err := concurrency.NewSession(client, opts...)
		if err != nil {
			client.Close()
			return nil, err
		}
		return &etcdReplica{client: client, session: session, name: o.name}, nil
	},
}

// etcdReplica has one session, on which all of its leases depend.
type etcdReplica struct {
	client  *clientv3.Client
	session *concurrency.Session
	name    string
}

// close does not revoke the session's lease, because behind a proxy that drops everything
// it would wait for an answer.
func (r *etcdReplica) close() {
	r.session.Orphan()
	r.client.Close()
}

func (r *etcdReplica) contender(name string) (contender, error) {
	return &etcdContender{replica: r, election: concurrency.NewElection(r.session, name)}, nil
}

type etcdContender struct {
	replica  *etcdReplica
	election *concurrency.Election
	job      running
}

func (c *etcdContender) campaign(ctx context.Context, job func(context.Context)) error {
	if err := c.acquire(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Only the session reports its end.
	defer context.AfterFunc(c.replica.session.Ctx(), cancel)()
	c.job.run(ctx, job)
	return nil
}

func (c *etcdContender) resign(ctx context.Context) error {
	c.job.stop()
	return c.release(ctx)
}

func (c *etcdContender) acquire(ctx context.Context) error {
	return c.election.Campaign(ctx, c.replica.name)
}

func (c *etcdContender) renew(ctx context.Context) error {
	_, err := c.replica.client.KeepAliveOnce(ctx, c.replica.session.Lease())
	return err
}

func (c *etcdContender) release(ctx context.Context) error { return c.election.Resign(ctx) }
