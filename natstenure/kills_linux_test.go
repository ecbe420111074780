package natstenure_test

import (
	"context"
	"testing"

	"github.com/tenurelib/tenure/natstenure"
	"github.com/tenurelib/tenure/proof/kills"
	"github.com/tenurelib/tenure/proof/kit"
)

// asVictim turns this process into one of the test below, if it is to be one.
func asVictim() {
	kills.Play(func(ctx context.Context, url string) (kit.FencingStore, error) {
		return natstenure.Open(ctx, url, natstenure.Config{SyncAlways: true, Logger: kit.Quiet})
	})
}

func TestKillsAtRandomInstantsNeitherOverlapNorLeaveALease(t *testing.T) {
	url := startChild(t).url
	kills.Run(t, open(t, url), url)
}
