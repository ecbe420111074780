//go:build unix

package etcdtenure_test

import (
	"fmt"
	"testing"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/etcdtenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestTheStoreKeepsTheContract(t *testing.T) {
	client := connect(t, start(t).client)
	stores := 0
	storetest.Run(t, func(t *testing.T) tenure.Store {
		stores++
		return openOn(t, client, etcdtenure.Config{Prefix: fmt.Sprint("s", stores, "/")})
	})
}
