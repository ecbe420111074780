package natstenure_test

import (
	"testing"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestTheStoreKeepsTheContract(t *testing.T) {
	storetest.Run(t, func(t *testing.T) tenure.Store { return open(t, start(t).ClientURL()) })
}
